r"""One text to vote with for all answers that are equal: numbers, words and math-verify's expressions.

    number       its decimal, to six places as math-verify rounds (six digits below 0.001)    1/2, 0.5, 50\% -> 0.5
    words        lower case, one blank                                                        \text{East} -> east
    assignment   what is assigned                                                             x = 5 -> 5
    inequality   of one variable: the interval                                                x > 2 -> (2, oo)
    set, tuple, interval, matrix    of their elements' texts, a set's in order                \{2,1\} -> {1, 2}
    rational expression             expanded numerator over denominator                       (x+1)^2 -> x**2 + 2*x + 1
    another      sympy's simplified one

math-verify's own relation is not transitive (it rounds, and takes 9\% for both 9 and 0.09), so votes need a text that
is. Equal texts are equal answers; equal answers of the last kind may have two texts, where sympy does not see it.
Only workers import sympy.
"""

from __future__ import annotations

import re
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from slime_rm_math.graders.answers import canonical
from slime_rm_math.graders.plain import number

PLACES = 6
MILLION = 10**PLACES
SMALL = Fraction(1, 1000)
LARGE = 10**300  # from here on thirty digits tell numbers apart
WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?: [A-Za-z0-9]+)*")  # two letters may be a product


def at_once(text: str) -> str | None:
    r"""The text of a plain number or of words; None where an expression has to be read.

    Example:
        at_once(r"\frac{1}{2}"), at_once("0.50"), at_once(r"\text{East}"), at_once("x^2")    # 0.5 0.5 east None
    """
    short = canonical(text)
    simple = number(text) or number(short)
    if simple is not None:
        return of_number(simple[0])
    return short.lower() if WORDS.fullmatch(short) else None


def of_number(value: Fraction) -> str:
    """A number's decimal.

    Example:
        of_number(Fraction(1, 3)), of_number(Fraction(-7)), of_number(Fraction(1, 3000))    # 0.333333 -7 3.33333e-4
    """
    rounded = round(value * MILLION)
    if abs(value) >= LARGE or (abs(value) < SMALL and rounded != value * MILLION):
        with localcontext() as context:
            context.prec = 30 if abs(value) >= 1 else PLACES
            shown = Decimal(value.numerator) / Decimal(value.denominator)
            return f"{shown.normalize():e}".replace("+", "")
    whole, part = divmod(abs(rounded), MILLION)
    return ("-" if rounded < 0 else "") + f"{whole}.{part:06d}".rstrip("0").rstrip(".")


def of_expression(expression: Any) -> str:
    """The text of an expression that math-verify read; only in a worker, since it may take for ever.

    Example:
        of_expression(sympy.FiniteSet(2, sympy.Rational(1, 2)))    # "{0.5, 2}"
    """
    import sympy
    from sympy.core.relational import Relational

    if isinstance(expression, sympy.MatrixBase):
        rows = [", ".join(of_expression(one) for one in expression.row(i)) for i in range(expression.rows)]
        return "[" + "; ".join(rows) + "]"
    if isinstance(expression, (sympy.And, sympy.Or)):
        return _of_relations(expression)
    if isinstance(expression, Relational):
        return _of_relation(expression)
    if isinstance(expression, sympy.Interval):
        opening, right = "(" if expression.left_open else "[", ")" if expression.right_open else "]"
        return f"{opening}{of_expression(expression.start)}, {of_expression(expression.end)}{right}"
    if isinstance(expression, sympy.FiniteSet):
        return "{" + ", ".join(sorted({of_expression(one) for one in expression.args})) + "}"
    if isinstance(expression, sympy.Union):
        joined = sympy.Union(*expression.args)
        if not isinstance(joined, sympy.Union):
            return of_expression(joined)
        return " U ".join(sorted(of_expression(one) for one in joined.args))
    if isinstance(expression, sympy.Tuple):
        return "(" + ", ".join(of_expression(one) for one in expression.args) + ")"
    if isinstance(expression, sympy.Symbol):
        return str(expression.name.lower() if len(expression.name) > 1 else expression.name)
    return _of_term(expression)


def _of_relation(relation: Any) -> str:
    import sympy
    from sympy.core.function import AppliedUndef

    left, right = relation.args
    if isinstance(relation, sympy.Eq):
        if isinstance(left, (sympy.Symbol, AppliedUndef)):
            return of_expression(right)
        sides = sorted((of_expression(left), of_expression(right)))
        return " = ".join(sides)
    if (interval := _solved(relation)) is not None:
        return interval
    flipped = relation if relation.rel_op in ("<", "<=", "!=") else relation.reversed
    less, more = flipped.args
    return f"{of_expression(less)} {flipped.rel_op} {of_expression(more)}"


def _of_relations(several: Any) -> str:
    import sympy

    if (interval := _solved(several)) is not None:
        return interval
    parts = getattr(several, "_unsorted_args", several.args)
    if isinstance(several, sympy.And) and all(isinstance(one, sympy.Eq) for one in parts):
        return of_expression(parts[-1].args[1])  # a = b = 5
    word = " and " if isinstance(several, sympy.And) else " or "
    return word.join(sorted(of_expression(one) for one in parts))


def _solved(relations: Any) -> str | None:
    """The set of inequalities in one variable, which answer as an interval does; None where sympy finds none."""
    import sympy

    if len(relations.free_symbols) != 1 or relations.has(sympy.Eq, sympy.Ne):
        return None
    try:
        solution = relations.func(*relations.args).as_set()
    except (NotImplementedError, TypeError, ValueError, AttributeError, KeyError):
        return None
    return of_expression(solution) if isinstance(solution, (sympy.Interval, sympy.Union)) else None


def _of_term(expression: Any) -> str:
    import sympy

    term = expression.doit()
    if isinstance(term, (sympy.MatrixBase, sympy.Set)):
        return str(term) if type(term) is type(expression) else of_expression(term)
    if not term.free_symbols and term.is_number and term.is_finite is not False:
        return _of_numeric(term)
    if term.is_rational_function():
        return str(sympy.cancel(sympy.nsimplify(term, rational=True)))
    return str(sympy.simplify(term))


def _of_numeric(expression: Any) -> str:
    import sympy

    if expression.is_Rational:
        return of_number(Fraction(int(expression.p), int(expression.q)))
    real, imaginary = expression.evalf(25, chop=True).as_real_imag()
    if imaginary != 0:
        return f"{_of_numeric(real)} + {_of_numeric(imaginary)}i"
    value = Decimal(str(sympy.Float(real, 25) if not expression.is_Float else expression))
    if not value.is_finite() or abs(value.adjusted()) > 300:
        return str(expression) if not value.is_finite() else f"{value:.20e}".replace("+", "")
    return of_number(Fraction(value))
