"""Words for what structure does not show: colours, materials and textures. Phrases, a comma between them."""

from __future__ import annotations

from itertools import product

_BASIC = """
amber, aqua, azure, beige, black, blue, bronze, brown, burgundy, charcoal, copper, coral, cream, crimson, cyan, gold,
golden, gray, green, grey, indigo, ivory, khaki, lavender, lilac, magenta, maroon, mauve, navy, olive, orange, peach,
pink, purple, red, rust, silver, tan, teal, turquoise, violet, white, yellow
"""

_SHADES = "bright, dark, deep, dull, faded, light, medium, muted, neon, pale, pastel, rich, soft, vivid, warm"

_COLOURS = """
auburn, blackish, blond, blonde, bluish, brownish, brunette, cerulean, chartreuse, chestnut, cobalt, colorful,
colorless, colourful, colourless, cream colored, dark colored, earth tone, ebony, ecru, emerald, fuchsia, ginger,
grayish, greenish, greyish, hazel, iridescent, jet black, light colored, lime green, mahogany, mint green,
monochromatic, monochrome, multicolored, multicoloured, mustard, navy blue, ochre, off white, orangish, pinkish, plum,
powder blue, purplish, reddish, royal blue, ruby, salmon, sapphire, scarlet, sepia, sky blue, snow white, taupe,
terracotta, umber, vermilion, whitish, yellowish
"""

_MATERIALS = """
acrylic, aluminium, aluminum, bamboo, brass, brick, burlap, canvas, cardboard, cashmere, cast iron, cedar, cement,
ceramic, chiffon, chrome, clay, concrete, corduroy, cork, cotton, crystal, denim, enamel, fabric, faux fur,
faux leather, felt, fiberglass, fibreglass, flannel, fleece, foam, fur, glass, granite, iron, jute, knit, lace, latex,
leather, linen, lycra, marble, mesh, metal, metallic, mink, nylon, oak, paper, papier mache, pewter, pine, plaster,
plastic, plywood, polyester, porcelain, quartz, rattan, rayon, resin, rubber, satin, sheepskin, shearling, silicone,
silk, slate, spandex, stainless steel, steel, stone, straw, styrofoam, suede, taffeta, terrycloth, thatch, tin,
titanium, tulle, tweed, velour, velvet, vinyl, walnut, wax, wicker, wood, wooden, woolen, woollen, wool, wrought iron,
zinc
"""

_TEXTURES = """
abrasive, bristly, brushed, bumpy, checkered, chequered, coarse, corrugated, cracked, creased, crinkled, crumpled,
crusty, distressed, dotted, embossed, embroidered, engraved, flecked, floral print, fluffy, frosted, furry, fuzzy,
gingham, glazed, glittery, glossy, grainy, gritty, herringbone, high gloss, houndstooth, jagged, knitted, lacy,
lustrous, marbled, matte, mottled, opaque, paisley, patterned, pebbled, pinstriped, plaid, pleated, polished, polka dot,
polka dotted, prickly, quilted, ribbed, ridged, rippled, rough, rugged, ruffled, satiny, scaly, see through,
semi transparent, shaggy, sheer, shimmering, shiny, silky, sleek, slick, smooth, soft, sparkly, speckled, spiky,
splotchy, spotted, stippled, streaked, striped, tartan, textured, tie dye, tie dyed, translucent, transparent, tufted,
uneven, varnished, veined, velvety, weathered, wiry, wooly, woolly, woven, wrinkled
"""


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split(",")]


def _colours() -> list[str]:
    basic = _phrases(_BASIC)
    shaded = [f"{shade} {colour}" for shade, colour in product(_phrases(_SHADES), basic)]
    return [*basic, *shaded, *_phrases(_COLOURS)]


LEXICONS: dict[str, list[str]] = {
    "colours": _colours(),
    "materials": _phrases(_MATERIALS),
    "textures": _phrases(_TEXTURES),
}
