"""C expressions and small C functions as syntax trees.

Transforms, before stage 1: ``elementwise.py`` gives the text of a user's elementwise function here, gets a
``Function`` of nodes, and applies our own operations to values as the nodes say. Nothing is compiled from the text,
and nothing in it is run.

What is read is the part of C in which a function of numbers is a formula: expressions over named scalars with all of
C's operators on numbers but ``=`` and ``++``; local declarations, assignments, ``if``, ``else`` and ``return``.
Loops, arrays and pointers are refused by name. All names are resolved here, so that a misspelt one is an error where
the function is defined, with the column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from blufunc.transforms.extension.c_tree import (
    TYPES,
    Apply,
    Cast,
    Function,
    If,
    Let,
    Name,
    Node,
    Number,
    Return,
    Statement,
    always_returns,
    fail,
    unknown,
)

# -- words -----------------------------------------------------------------------------------------

_TYPE_WORDS = {word for name in TYPES for word in name.split()}
_QUALIFIERS = {"const", "constexpr", "static", "inline", "__device__", "__host__", "__forceinline__"}

CONSTANTS = {
    "true": True,
    "false": False,
    "INFINITY": float("inf"),
    "NAN": float("nan"),
    "M_PI": math.pi,
    "M_PI_2": math.pi / 2,
    "M_E": math.e,
    "M_LN2": 0.6931471805599453,
    "M_LOG2E": 1.4426950408889634,
    "M_SQRT2": 1.4142135623730951,
    "M_SQRT1_2": 0.7071067811865476,
    "M_2_SQRTPI": 1.1283791670955126,
}

_LEVELS = ("||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %")
_BINDING = {op: level for level, ops in enumerate(_LEVELS) for op in ops.split()}
_ASSIGNMENTS = {"=": None, **{f"{op}=": op for op in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>")}}
_NOT_HERE = {
    **dict.fromkeys(("for", "while", "do", "goto", "break", "continue"), "loops"),
    **dict.fromkeys(("switch", "case"), "switch"),
    **dict.fromkeys(("[", "->", "."), "arrays, pointers and structures"),
    **dict.fromkeys(("++", "--"), "++ and --"),
}

_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*|/\*.*?\*/)"
    r"|(?P<number>0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?P<suffix>[fFlLuU]*)"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<mark><<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\+\+|--|->|[-+*/%<>=!~&|^?:,;(){}\[\].])",
    re.DOTALL,
)


@dataclass(frozen=True)
class _Token:
    kind: str  # number, word, mark or end
    text: str
    at: int
    value: Any = None


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            fail(text, at, f"{text[at]!r} is no part of an expression in C")
        kind = match.lastgroup if match.lastgroup != "suffix" else "number"
        if kind == "number":
            digits, after = match["number"], text[match.end() : match.end() + 1]
            if after.isalnum() or after == "_":
                fail(text, at, f"{digits}{match['suffix']}{after} is no number")
            found.append(_Token(kind, match[0], at, _number(digits, match["suffix"])))
        elif kind != "skip":
            found.append(_Token(kind, match[0], at))  # type: ignore[arg-type]
        at = match.end()
    return [*found, _Token("end", "the end", len(text))]


def _number(digits: str, suffix: str) -> int | float:
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    if digits.isdigit() and "f" not in suffix.lower():
        return int(digits, 8) if digits[0] == "0" and digits.strip("01234567") == "" else int(digits)
    return float(digits)


# -- the parser ------------------------------------------------------------------------------------


def parse(text: str, inputs: Sequence[str] | None, functions: dict[str, range]) -> Function:
    """The tree of an expression, or of the definition of one function.

    Args:
      text: C.
      inputs: the names that an expression may use; None: any, which become its inputs as they appear.
      functions: those that can be called, with the numbers of arguments that they take.
    Raises:
      CompileError: it is not C, or not of the part of C that is read; with the column.
    """
    return _Parser(text, inputs, functions).parse()


class _Parser:
    """Recursive descent, one method for each thing that there is."""

    def __init__(self, text: str, inputs: Sequence[str] | None, functions: dict[str, range]):
        self.text, self.functions = text, functions
        self.tokens, self.i = _tokens(text), 0
        self.open = inputs is None  # whether unknown names are inputs
        self.types: dict[str, str] = dict.fromkeys(inputs or (), "auto")  # of the names that are visible
        self.assigned: set[str] = set(self.types)
        self.is_function = any(t.text == "{" for t in self.tokens)
        # in an expression T can be nothing but a name, as of a temperature
        self.type_words = _TYPE_WORDS if self.is_function else _TYPE_WORDS - {"T"}

    def parse(self) -> Function:
        """The whole text."""
        if not self.is_function:
            value = self.expression()
            self.expect("end")
            names = tuple((name, "auto") for name in self.types)
            return Function(None, names, "auto", (Return(value, value.at),), self.text)
        if not self.open:
            fail(self.text, 0, "the inputs are given twice", "leave inputs= out: a function has parameters")
        self.open = False
        return self.function()

    # -- tokens

    @property
    def token(self) -> _Token:
        return self.tokens[self.i]

    def take(self, *texts: str) -> _Token | None:
        """The next token if it is one of ``texts``."""
        token = self.token
        if token.text not in texts or token.kind == "end":
            return None
        self.i += 1
        return token

    def expect(self, text: str) -> _Token:
        """The next token, which must be ``text`` (``end``: the end; ``name``: a name)."""
        token = self.token
        if (
            token.kind == "end"
            if text == "end"
            else token.kind == "word"
            if text == "name"
            else token.text == text
        ):
            self.i += 1
            return token
        self.refuse(
            f"{'a name' if text == 'name' else 'the end' if text == 'end' else repr(text)} is expected here"
        )

    def refuse(self, what: str) -> NoReturn:
        """Raise for the next token."""
        token = self.token
        if thing := _NOT_HERE.get(token.text):
            what, fix = (
                f"{thing} are more than an elementwise function can have",
                "write it with bf.cuda_kernel",
            )
            fail(self.text, token.at, what, fix)
        fail(self.text, token.at, f"{what}, not {token.text if token.kind == 'end' else repr(token.text)}")

    def type(self) -> str | None:
        """The name of a type, if one is next; qualifiers around it are passed over."""
        words, start = [], self.i
        while self.token.kind == "word" and self.token.text in _QUALIFIERS | self.type_words:
            if self.token.text not in _QUALIFIERS:
                words.append(self.token.text)
            self.i += 1
        if not words:
            self.i = start
            return None
        if len(words) > 1 and words[-1] == "int" and words[-2] in ("long", "short"):
            words.pop()
        name = " ".join(words)
        if name not in TYPES:
            fail(
                self.text,
                self.tokens[start].at,
                f"there is no type {name!r}",
                f"use one of {', '.join(TYPES)}",
            )
        if self.token.text in ("*", "&") and self.tokens[self.i + 1].kind == "word":
            fail(self.text, self.token.at, "pointers and references are more than an elementwise function can have",
                 "declare the element: float x; or write it with bf.cuda_kernel")  # fmt: skip
        return name

    # -- statements

    def function(self) -> Function:
        """``type name(type x, ...) { ... }``."""
        if self.take("template"):
            for mark in ("<", None, "T", ">"):
                self.expect(mark) if mark else self.expect("name")
        start = self.token
        result = self.type()
        if result is None:
            fail(
                self.text,
                start.at,
                "a function begins with the type of its result",
                "float f(float x) { ... }",
            )
        name = self.expect("name").text
        self.expect("(")
        while not self.take(")"):
            if self.types:
                self.expect(",")
            kind = self.type()
            if kind is None:
                self.refuse("the type of a parameter is expected here")
            self.declare(self.expect("name"), kind)
        self.assigned = set(self.types)
        inputs = tuple(self.types.items())
        self.expect("{")
        body = self.block()
        self.expect("end")
        if not always_returns(body):
            fail(
                self.text,
                self.tokens[-2].at,
                f"{name} can end without a return",
                "return a value on every path",
            )
        return Function(name, inputs, result, body, self.text)

    def declare(self, token: _Token, kind: str) -> None:
        """A new name."""
        if token.text in self.types or token.text in CONSTANTS or token.text in self.functions:
            fail(self.text, token.at, f"the name {token.text!r} is taken", "use another one")
        self.types[token.text] = kind

    def block(self) -> tuple[Statement, ...]:
        """Statements up to ``}``; what they declare ends there."""
        outside = set(self.types)
        statements: list[Statement] = []
        while not self.take("}"):
            if self.token.kind == "end":
                self.refuse("'}' is expected here")
            statements += self.statement()
        for name in set(self.types) - outside:
            del self.types[name]
            self.assigned.discard(name)
        return tuple(statements)

    def statement(self) -> tuple[Statement, ...]:
        """One statement, which may be several of the tree, or none."""
        if self.take(";"):
            return ()
        if self.take("{"):
            return self.block()
        if token := self.take("return"):
            value = self.expression()
            self.expect(";")
            return (Return(value, token.at),)
        if token := self.take("if"):
            return (self.condition(token),)
        kind = self.type()
        return self.declarations(kind) if kind else self.assignment()

    def condition(self, token: _Token) -> If:
        """``if (test) one else other``; a variable has a value afterwards if each side that goes on gives it one."""
        self.expect("(")
        test = self.expression()
        self.expect(")")
        before = set(self.assigned)
        then = self.statement()
        after_then, self.assigned = self.assigned, set(before)
        other = self.statement() if self.take("else") else ()
        if always_returns(other):
            self.assigned = after_then
        elif not always_returns(then):
            self.assigned &= after_then
        return If(test, then, other, token.at)

    def declarations(self, kind: str) -> tuple[Statement, ...]:
        """``a = 1, b;`` after a type."""
        found: list[Statement] = []
        while True:
            name = self.expect("name")
            if self.token.text == "[":
                self.refuse("';' is expected here")
            value = self.expression() if self.take("=") else None  # in which the name is not known yet
            self.declare(name, kind)
            if value is not None:
                found.append(Let(name.text, kind, value, name.at))
                self.assigned.add(name.text)
            if not self.take(","):
                self.expect(";")
                return tuple(found)

    def assignment(self) -> tuple[Statement, ...]:
        """``x = value;`` or ``x += value;``."""
        if self.token.kind != "word" or self.token.text in _NOT_HERE:
            self.refuse("a statement is expected here")
        name = self.expect("name")
        if name.text not in self.types:
            unknown(
                self.text, name, name.text, "variable", self.types, f"declare it: float {name.text} = ...;"
            )
        sign = self.take(*_ASSIGNMENTS)
        if sign is None:
            self.refuse("'=' is expected here")
        op = _ASSIGNMENTS[sign.text]
        if op and name.text not in self.assigned:
            fail(self.text, name.at, f"{name.text} has no value yet")
        value = self.expression()
        if op:
            value = Apply(op, (Name(name.text, name.at), value), sign.at)
        self.expect(";")
        self.assigned.add(name.text)
        return (Let(name.text, self.types[name.text], value, name.at),)

    # -- expressions

    def expression(self) -> Node:
        """With ``?:``, which binds least, and from the right."""
        test = self.operation(0)
        mark = self.take("?")
        if mark is None:
            return test
        then = self.expression()
        self.expect(":")
        return Apply("?:", (test, then, self.expression()), mark.at)

    def operation(self, level: int) -> Node:
        """Operators of two operands that bind as ``level`` or tighter."""
        if level == len(_LEVELS):
            return self.unary()
        left = self.operation(level + 1)
        while _BINDING.get(self.token.text) == level:
            mark = self.token
            self.i += 1
            left = Apply(mark.text, (left, self.operation(level + 1)), mark.at)
        return left

    def unary(self) -> Node:
        """``-x``, ``(int)x``, or what has no operator in front."""
        mark = self.take("-", "+", "!", "~")
        if mark:
            return Apply(mark.text, (self.unary(),), mark.at)
        if self.token.text == "(" and self.tokens[self.i + 1].text in self.type_words:
            mark = self.expect("(")
            kind = self.type()
            self.expect(")")
            return Cast(kind, self.unary(), mark.at)  # type: ignore[arg-type]
        return self.primary()

    def primary(self) -> Node:
        """A number, a name, a call, or an expression in parentheses."""
        token = self.token
        if self.take("("):
            inner = self.expression()
            self.expect(")")
        elif token.kind == "number":
            self.i += 1
            inner = Number(token.value, token.at)
        elif self.take("static_cast"):
            self.expect("<")
            kind = self.type()
            self.expect(">")
            self.expect("(")
            inner = Cast(kind or "auto", self.expression(), token.at)
            self.expect(")")
        elif token.kind == "word" and token.text in self.type_words:
            kind = self.type()
            self.expect("(")
            inner = Cast(kind, self.expression(), token.at)  # type: ignore[arg-type]
            self.expect(")")
        elif token.kind == "word" and token.text not in _NOT_HERE:
            self.i += 1
            inner = self.call(token) if self.token.text == "(" else self.name(token)
        else:
            self.refuse("a value is expected here")
        if self.token.text in _NOT_HERE:
            self.refuse("")
        return inner

    def name(self, token: _Token) -> Node:
        """A variable, which must have a value, or a constant."""
        if token.text not in self.types and token.text in CONSTANTS:
            return Number(CONSTANTS[token.text], token.at)
        if self.open and token.text not in self.functions:
            self.types.setdefault(token.text, "auto")
            self.assigned.add(token.text)
        if token.text not in self.types:
            known = [*self.types, *CONSTANTS]
            unknown(self.text, token, token.text, "input", known, f"the inputs are {', '.join(self.types)}")
        if token.text not in self.assigned:
            fail(self.text, token.at, f"{token.text} has no value on some path to here", "give it one first")
        return Name(token.text, token.at)

    def call(self, token: _Token) -> Node:
        """``f(a, b)`` of a function that is known."""
        plain = token.text if token.text in self.functions else token.text.removesuffix("f")  # expf
        known = self.functions.get(plain)
        if known is None:
            fix = f"the functions are {', '.join(sorted(self.functions))}"
            unknown(self.text, token, token.text, "function", self.functions, fix)
        self.expect("(")
        args: list[Node] = []
        while not self.take(")"):
            if args:
                self.expect(",")
            args.append(self.expression())
        if len(args) not in known:
            numbers = " or ".join(map(str, known))
            fail(
                self.text,
                token.at,
                f"{plain} takes {numbers} argument{'s' * (numbers != '1')}, not {len(args)}",
            )
        return Apply(plain, tuple(args), token.at)
