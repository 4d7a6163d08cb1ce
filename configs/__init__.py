"""Files that ship with the package: DeepSpeed configs, recipes and open_clip model configs."""
