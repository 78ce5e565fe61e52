"""Arithmetic as people and LaTeX write it, read by recursive descent into a tree whose value is an exact fraction.

Grammar: sums of products of signed powers; a product may leave out its sign (2x, 3\\sqrt{2}) except between numbers:
3 4 is no 12. A whole number in front of \\frac is a mixed number (-1\\frac12 is -1.5).
Only roots and pi leave the rational numbers. Letters are variables, and two expressions in them are equal when they
agree at a few fixed points. Words are no products of letters: only x, y, z, a, b, c may stand side by side.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

Number = Fraction | float

MAX_EXPONENT = 64
MAX_DIGITS = 60
MAX_DEPTH = 40
_RELATIVE_TOLERANCE = 1e-9
_POINTS = (Fraction(3, 7), Fraction(-11, 5), Fraction(13, 3))
_TOKEN = re.compile(
    r"\s*(?:(\d+\.\d*|\.\d+|\d+)|\\(frac|sqrt|pi|cdot|times|div)(?![a-zA-Z])|(sqrt|pi)(?![a-zA-Z])|(\*\*|[-+*/^(){}\[\]])"
    r"|(π|√|×|·|÷)|([a-zA-Z]))"
)
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!sqrt|pi|[abcxyz]{2,3}(?![a-zA-Z]))[a-zA-Z]{2,}")
_SIGNS = {"cdot": "*", "times": "*", "×": "*", "·": "*", "div": "/", "÷": "/", "**": "^", "π": "pi", "√": "sqrt"}


class NotAnExpression(ValueError):
    """The text is no expression of this grammar, has no finite value, or is too large to be an answer."""


@dataclass(frozen=True)
class Expression:
    """A readable expression: `value(point)` with a number for each of its `variables`."""

    value: Callable[[Mapping[str, Fraction]], Number]
    variables: frozenset[str]


def parse(text: str) -> Expression:
    """The expression that `text` spells. Raises NotAnExpression."""
    reader = _Reader(_tokens(text))
    value = reader.sum(0)
    if reader.next != "":
        raise NotAnExpression(f"{reader.next!r} is left over")
    return Expression(value, frozenset(token for token in reader.tokens if len(token) == 1 and token.isalpha()))


def equal(left: Expression, right: Expression) -> bool:
    """Whether both have the same value, exactly where both are rational, else to 1e-9; at three points of variables.

    Raises NotAnExpression where a value does not exist.
    """
    names = sorted(left.variables | right.variables)
    for number in range(len(_POINTS) if names else 1):
        point = {name: _POINTS[(number + i) % len(_POINTS)] + i for i, name in enumerate(names)}
        a, b = _finite(left, point), _finite(right, point)
        exact = isinstance(a, Fraction) and isinstance(b, Fraction)
        if not (a == b if exact else math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_RELATIVE_TOLERANCE)):
            return False
    return True


def _finite(expression: Expression, point: Mapping[str, Fraction]) -> Number:
    try:
        value = expression.value(point)
    except (ArithmeticError, ValueError) as error:
        raise NotAnExpression(str(error)) from error
    if isinstance(value, complex) or not math.isfinite(value):
        raise NotAnExpression(f"its value is {value}")
    return value


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    text = text.rstrip()
    word = _WORD.search(text)
    if word is not None:
        raise NotAnExpression(f"{word[0]!r} is a word")
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotAnExpression(f"{text[at:]!r} cannot be read")
        token = next(group for group in match.groups() if group is not None)
        if len(token) > MAX_DIGITS:
            raise NotAnExpression(f"a number of {len(token)} digits")
        tokens.append(_SIGNS.get(token, token))
        at = match.end()
    return tokens


class _Reader:
    """Recursive descent over tokens. Each method reads one level of the grammar and returns what computes its value."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.at = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.next
        if not token or (expected and token not in expected):
            raise NotAnExpression(f"{token!r} instead of {' or '.join(expected) or 'a number'}")
        self.at += 1
        return token

    def sum(self, depth: int):
        if depth > MAX_DEPTH:
            raise NotAnExpression("too many brackets")
        value = self.product(depth)
        while self.next in ("+", "-"):
            value = _binary(self.take(), value, self.product(depth))
        return value

    def product(self, depth: int):
        value = self.signed(depth)
        while self.next not in ("", "+", "-", ")", "}", "]"):
            if self.next in ("*", "/"):
                value = _binary(self.take(), value, self.signed(depth))
            elif _is_number(self.next) and _is_number(self.tokens[self.at - 1]):
                raise NotAnExpression(f"{self.next!r} stands beside a number")
            else:
                value = _binary("*", value, self.power(depth))
        return value

    def signed(self, depth: int):
        negative = False
        while self.next in ("+", "-"):
            negative ^= self.take() == "-"
        value = self.power(depth)
        return _binary("-", lambda point: Fraction(0), value) if negative else value

    def power(self, depth: int):
        base = self.mixed(depth)
        if self.next != "^":
            return base
        self.take("^")
        sign = self.take() if self.next == "-" else "+"
        exponent = self.atom(depth)
        return _binary("^", base, exponent if sign == "+" else _binary("-", lambda point: Fraction(0), exponent))

    def mixed(self, depth: int):
        """An atom, or a whole number and the fraction behind it."""
        is_whole = self.next.isdigit()
        value = self.atom(depth)
        return _binary("+", value, self.atom(depth)) if is_whole and self.next == "frac" else value

    def atom(self, depth: int):
        token = self.take()
        if _is_number(token):
            number = Fraction(token if token[-1] != "." else token[:-1])
            return lambda point: number
        if token in ("(", "{", "["):
            value = self.sum(depth + 1)
            self.take({"(": ")", "{": "}", "[": "]"}[token])
            return value
        if token == "pi":
            return lambda point: math.pi
        if token == "sqrt":
            return self.root(depth)
        if token == "frac":
            return _binary("/", self.argument(depth), self.argument(depth))
        if len(token) == 1 and token.isalpha():
            return lambda point: point[token]
        raise NotAnExpression(f"{token!r} has no place here")

    def argument(self, depth: int):
        r"""An argument of a command: a braced one, or, as in \frac12, a single digit."""
        token = self.next
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.atom(depth)

    def root(self, depth: int):
        degree = Fraction(2)
        if self.next == "[":
            self.take("[")
            digits = self.take()
            if not digits.isdigit() or digits == "0":
                raise NotAnExpression(f"{digits!r} is no degree of a root")
            degree = Fraction(digits)
            self.take("]")
        radicand = self.argument(depth)
        return lambda point: _root(radicand(point), int(degree))


def _is_number(token: str) -> bool:
    return token[:1].isdigit() or token[:1] == "."


def _binary(sign: str, left, right):
    operation = _OPERATIONS[sign]
    return lambda point: operation(left(point), right(point))


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > MAX_EXPONENT or abs(base) > 10**MAX_DIGITS:  # type: ignore[operator]  # mypy on Fraction | float
        raise NotAnExpression(f"an exponent of {exponent}")
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        return base ** int(exponent)
    return _root(base, 2) if exponent == Fraction(1, 2) else float(base) ** float(exponent)


def _root(value: Number, degree: int) -> Number:
    """Exact for perfect powers, so that a root of 4/9 is a fraction."""
    if degree > MAX_EXPONENT or (value < 0 and degree % 2 == 0):
        raise NotAnExpression(f"root {degree} of {value}")
    root = math.copysign(abs(float(value)) ** (1 / degree), value)
    if isinstance(value, Fraction):
        exact = Fraction(round(abs(value.numerator) ** (1 / degree)), round(value.denominator ** (1 / degree)))
        if exact**degree == abs(value):
            return exact if value >= 0 else -exact
    return root


_OPERATIONS: dict[str, Callable[[Number, Number], Number]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "^": _power,
}
