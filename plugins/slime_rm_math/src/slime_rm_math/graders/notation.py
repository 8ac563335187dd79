r"""Unicode and shorthand of an answer as LaTeX that math-verify reads. Linear time.

    3½  ¾  x²  2√3  90°  (−∞, 1]       3\frac{1}{2}  \frac{3}{4}  x^{2}  2\sqrt{3}  90^\circ  (-\infty , 1]
    3 1/2  1.25e3  0.\overline{36}      3\frac{1}{2}  1.25\cdot 10^{3}  \frac{4}{11}
    1 250  \lbrace 1\rbrace             1250  \{1\}

What it does not know stays as it is. Labels and answers pass through alike.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

FOLDED = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in range(0x1D400, 0x1D800)},  # 𝑥, 𝟕
    **dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212), "-"),
    **dict.fromkeys((0xA0, 0x2002, 0x2003, 0x2007, 0x2008, 0x2009, 0x200A, 0x202F, 0x205F, 0x3000), " "),
    0x2044: "/",
    0x2215: "/",
}
"""Characters that look like one of ASCII."""


def _fraction(above: object, below: object) -> str:
    return f"\\frac{{{above}}}{{{below}}}"


COMMANDS = {
    "×": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "÷": "div", "±": "pm", "∓": "mp", "≤": "le", "⩽": "le",
    "≥": "ge", "⩾": "ge", "≠": "ne", "≈": "approx", "∞": "infty", "∪": "cup", "∩": "cap", "∅": "emptyset", "∈": "in",
    "π": "pi", "…": "ldots", "€": "$", "£": "$",
}  # fmt: skip
PARTS = {sign: _fraction(*unicodedata.normalize("NFKC", sign).split("\u2044")) for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
OTHERS = {"°": "^\\circ ", "⟨": "(", "⟩": ")", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "~": " "}
SIGNS = str.maketrans({**{sign: f"\\{name} " for sign, name in COMMANDS.items()}, **PARTS, **OTHERS})
RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉"
POWERS, PLACES = str.maketrans(RAISED, "0123456789+-n"), str.maketrans(LOWERED, "0123456789")


def _root(match: re.Match[str]) -> str:
    degree, inside = "[3]" if match[1] == "∛" else "", match[2] or match[3]
    return f"\\sqrt{degree}" + (f"{{{inside}}}" if inside else "")


def _repeating(match: re.Match[str]) -> str:
    """``0.1\\overline{6}`` as ``\\frac{1}{6}``."""
    whole, first, period = match.groups()
    nines = 10 ** len(period) - 1
    value = Fraction(int(whole + first or "0") * nines + int(period), nines * 10 ** len(first))
    return _fraction(value.numerator, value.denominator)


SHORT: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\(?:lbrace|rbrace)(?![A-Za-z])"), lambda m: "\\{" if m[0][1] == "l" else "\\}"),
    (re.compile(r"\\(?:langle|rangle)(?![A-Za-z])"), lambda m: "(" if m[0][1] == "l" else ")"),
    (re.compile(r"\\(le|ge)qslant(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\mathbb ([A-Z])(?![A-Za-z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\mathrm\{([ei])\}"), r"\1"),
    (re.compile(r"(?:\\(?:text)?color\{[a-zA-Z]{1,20}\}|\\underline)(?:\{([^{}]{0,999})\})?"), lambda m: m[1] or ""),
    (re.compile(rf"[{RAISED}]+"), lambda m: f"^{{{m[0].translate(POWERS)}}}"),
    (re.compile(rf"[{LOWERED}]+"), lambda m: f"_{{{m[0].translate(PLACES)}}}"),
    (re.compile(r"([√∛])\s{0,4}(?:\(([^()√∛]{1,64})\)|([0-9]{1,64}|[A-Za-z]|(?=\{)))"), _root),
    (re.compile(r"([0-9]{0,12})\.([0-9]{0,12})\\overline\{([0-9]{1,12})\}"), _repeating),
    (re.compile(r"(?<![0-9/.,^_{}])([0-9]{1,12}) {1,4}([0-9]{1,9})/([0-9]{1,9})(?![0-9/.])"), r"\1\\frac{\2}{\3}"),
)
PLUS_MINUS, INSIDE = re.compile(r"\\pm(?![A-Za-z])"), re.compile(r"\{[^{}]{0,99}\\pm(?![A-Za-z])")
SCIENTIFIC = re.compile(r"([+-]?[0-9]{1,64}(?:\.[0-9]{1,64})?)[eE]([+-]?[0-9]{1,4})")
SPACED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3}){1,6}(?:\.[0-9]{1,64})?")


def folded(text: str) -> str:
    """A text with the characters of ASCII in place of those that look the same.

    Example:
        folded("−４２")    # "-42"
    """
    return text if text.isascii() else text.translate(FOLDED)


def latex(text: str) -> str:
    r"""A text as LaTeX; see the module.

    Example:
        latex("3½"), latex("x²≤2√3"), latex("1.25e3")    # 3\frac{1}{2}, x^{2}\le 2\sqrt{3}, 1.25\cdot 10^{3}
    """
    text = folded(text).strip()
    if (number := SCIENTIFIC.fullmatch(text)) is not None:
        return f"{number[1]}\\cdot 10^{{{int(number[2])}}}"
    if SPACED.fullmatch(text):
        return text.replace(" ", "")
    for pattern, replacement in SHORT:
        text = pattern.sub(replacement, text)
    return _both(text.translate(SIGNS).strip())


def _both(text: str) -> str:
    """A term with plus or minus inside of braces, which math-verify reads only outside of them, as two."""
    if not INSIDE.search(text) or "," in text or "\\{" in text or "\\mp" in text:
        return text
    return ", ".join(PLUS_MINUS.sub(sign, text) for sign in "+-")
