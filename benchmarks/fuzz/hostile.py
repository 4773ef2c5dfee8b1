"""Values for headers that nobody should send, and which of them are legal all the same."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from random import Random
from typing import Final, cast

from meshnet.wire import headers


def _context_of_mask(mask: bytes) -> bytes:
    return b'{"allowed": "%s"}' % base64.b64encode(zlib.compress(mask))


TEXTS: Final = (
    *(b"", b" ", b"a b", b"a\tb", b"a/b", b"../../etc/passwd", b"%00", b"%0d%0aX: y", b"a;b", b'"'),
    *(b"-1", b"-0", b"+1", b"1.0", b"1.5", b"1e3", b"0x10", b"1_0", b"007", b"NaN", b"inf", b"1,"),
    *(b"2147483647", b"2147483648", b"4294967296", b"9223372036854775808", b"9" * 5000),
    *(b"null", b"true", b"[]", b"{}", b"{", b"object", b"int8", b"float64", b"Float32"),
    *("é".encode("latin-1"), "é".encode(), "٣".encode(), "\u202e\u2028".encode(), b"\xff\xfe"),
    *(b"\x01\x02", b"\x7f", b"\x80", b"a\x00b", b"a\x0bb", b"x" * 129, b"x" * 20_000),
    *(b"prefill,decode", b"PREFILL", b"${jndi:ldap://x}", b"' OR 1=1 --", b"__proto__"),
)

SHAPES: Final = (
    *("1", "1,", ",1", "1,,1", "1,1,1,1", "-1,-1", "1,-1,576", "0,0", "1,0,576", "1,1,0", "a,b"),
    *("1,2147483648", "1,1,2147483648", "1,1099511627776,576", "9223372036854775808,1,1"),
    *("1,1.0,576", "1,1e3,576", "1,NaN", "(1,1)", "[1,1]", "1;1", "1x1", "1,٣", "1," + "9" * 5000),
    "1," * 5000 + "1",
)
"""Every one is refused."""

HUGE_SHAPES: Final = (
    *("1,2147483647", "2147483647,2147483647", "1,2147483647,576", "1,2147483647,2147483647"),
    *("2147483647,2147483647,2147483647", "1,1,2147483647", "1,1048576", "1,1048576,576"),
)
"""Legal as headers, and far more than any step may carry."""

SAMPLINGS: Final = (
    *("", "{", "[]", "7", "true", '"hot"', "nul", "{}{}", "{} x", "{'temperature': 1}"),
    *('{"temperature": NaN}', '{"temperature": Infinity}', '{"temperature": -0.1}'),
    *('{"temperature": 1e999}', '{"temperature": null}', '{"temperature": [1]}'),
    *('{"temperature": "hot"}', '{"top_p": 1.1}', '{"top_p": -1}', '{"top_k": -1}'),
    *('{"top_k": 1.5}', '{"seed": 9223372036854775808}', '{"seed": 1.5}'),
    *('{"seed": -9223372036854775809}', '{"seed": 1e40}', '{"seed": {}}', '{"unknown": 1}'),
    *("[" * 9000, '{"seed":' * 2000, '{"a": "\\ud800"}', '{"temperature": 1', '{"\\u0000": 1}'),
    *('{"temperature": 3}', '{"logit_bias": {"1": 9}}', '{"seed": 1, "__class__": 2}'),
    *('{"min_p": 1.1}', '{"min_p": -1}', '{"frequency_penalty": 2.1}', '{"top_logprobs": 21}'),
    *('{"presence_penalty": -2.1}', '{"repetition_penalty": 0}', '{"repetition_penalty": 1e-300}'),
    *('{"top_logprobs": -1}', '{"frequency_penalty": NaN}', '{"%s": 1}' % ("x" * 9000)),
)
"""Every one is refused."""

EXTREME_SAMPLINGS: Final = (
    *("{}", '{"top_k": ' + "9" * 4000 + "}", '{"temperature": 2, "top_k": 9223372036854775808}'),
    *('{"temperature": 2, "top_p": 0}', '{"temperature": 1e-5, "top_p": 5e-324}'),
    *('{"temperature": 5e-324}', '{"temperature": 2, "seed": -9223372036854775808}'),
    '{"seed": 9223372036854775807, "temperature": 2, "top_k": 1, "top_p": 1}',
    '{"temperature": 2, "min_p": 1, "repetition_penalty": 0.01, "top_logprobs": 20}',
    '{"temperature": 1e-5, "frequency_penalty": -2, "presence_penalty": 2, "top_logprobs": 0}',
    '{"repetition_penalty": 10, "frequency_penalty": 2, "min_p": 5e-324, "temperature": 2}',
)
"""Every one is taken."""

CONTEXTS: Final = (
    *(b"{", b"[]", b"7", b"null", b'"x"', b"\0", b"\xff\xfe", b"{}{}", b"{} x", b" ", b"nul", b"'"),
    *(b"[" * 100_000, b'{"prompt_ids":' * 5000, b"9" * 100_000, b'{"a": "\\ud800"}'),
    *(b'{"unknown": 1}', b'{"%s": 1}' % (b"x" * 100_000), b'{"x": [%s[]]}' % (b"[]," * 30_000)),
    *(
        b'{"prompt_ids": [-1]}',
        b'{"prompt_ids": 1}',
        b'{"prompt_ids": {}}',
        b'{"prompt_ids": [1.5]}',
    ),
    *(b'{"prompt_ids": [2147483647]}', b'{"prompt_ids": [2147483648]}', b'{"prompt_ids": [1e999]}'),
    *(b'{"generated_ids": [%s]}' % (b"-1," * 30_000 + b"-1"), b'{"generated_ids": [[]]}'),
    *(b'{"banned_ids": [999999999]}', b'{"banned_ids": ["x"]}', b'{"banned_ids": null}'),
    *(
        b'{"logit_bias": {"999999999": 1}}',
        b'{"logit_bias": {"-1": 1}}',
        b'{"logit_bias": {"": 1}}',
    ),
    *(
        b'{"logit_bias": {"1": 100.1}}',
        b'{"logit_bias": {"1": NaN}}',
        b'{"logit_bias": {"1": 1e999}}',
    ),
    *(
        b'{"logit_bias": {"1": null}}',
        b'{"logit_bias": []}',
        b'{"logit_bias": {"%s": 1}}' % (b"9" * 50_000),
    ),
    b'{"logit_bias": {%s}}' % b",".join(b'"%d": 1' % i for i in range(1025)),
    b'{"logit_bias": {%s}}' % b",".join(b'"x%d": 1' % i for i in range(10_000)),
    *(b'{"next_ids": [999999999]}', b'{"next_ids": [%s1]}' % (b"1," * 50_000)),
    *(b'{"allowed": 1}', b'{"allowed": ""}', b'{"allowed": "AAAA"}', b'{"allowed": "\\u00e9"}'),
    *(b'{"allowed": "A"}', b'{"allowed": []}', b'{"allowed": "%s"}' % (b"A" * 100_000)),
    *(_context_of_mask(mask) for mask in (b"", bytes(100), bytes(2**20), bytes(2**26))),
    _context_of_mask(b"\1")[:-9] + b'"}',
)
"""Every one is refused, behind a step of a few tokens."""

_TOKEN: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_TOKENS: Final = (
    headers.SESSION,
    headers.FINGERPRINT,
    headers.STEP,
    headers.REQUEST_ID,
    headers.BOOT,
    headers.FORK_OF,
)
_NUMBERS: Final = (headers.PAST_LEN, headers.START_LAYER, headers.EPOCH)
_MODES: Final = (b"prefill", b"decode", b"stateless")
_DTYPES: Final = (b"int32", b"float32", b"bfloat16", b"float16")

STEP_HEADERS: Final = (
    *_TOKENS,
    *_NUMBERS,
    *(headers.CACHE, headers.SHAPE, headers.DTYPE, headers.SAMPLING, headers.TRACEPARENT),
    headers.CONTEXT_BYTES,
)


def hostile_text(rng: Random) -> bytes:
    """Some value: a known nuisance, or noise that cannot end the header."""
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    noise = rng.randbytes(rng.choice((1, 3, 20, 200)))
    return noise.replace(b"\r", b"?").replace(b"\n", b"?")


def value_for(rng: Random, name: str) -> bytes:
    """A hostile value for a header; it may be legal."""
    special = {headers.SHAPE: (*SHAPES, *HUGE_SHAPES), headers.SAMPLING: SAMPLINGS}.get(name)
    if special is not None and rng.random() < 0.7:
        return rng.choice(special).encode()
    return hostile_text(rng)


def illegal_value(rng: Random, name: str) -> bytes:
    """A value that this header must not have."""
    if name == headers.TRACEPARENT:
        return b"x" * rng.randint(257, 5000)
    while is_legal(name, value := value_for(rng, name)):
        pass
    return value


def is_legal(name: str, value: bytes) -> bool:
    """Whether the protocol takes `value` for a header, by itself; in doubt it is legal."""
    text = value.strip(b" \t")  # HTTP does not count these
    judges: dict[str, Callable[[], bool]] = {
        **dict.fromkeys(_TOKENS, lambda: _TOKEN.fullmatch(text) is not None),
        **dict.fromkeys(_NUMBERS, lambda: _is_number(text)),
        headers.CACHE: lambda: text in _MODES,
        headers.DTYPE: lambda: text in _DTYPES,
        headers.SHAPE: lambda: _may_be_shape(text),
        headers.SAMPLING: lambda: _may_be_sampling(text),
        headers.TRACEPARENT: lambda: len(text) <= 256,
        headers.KEEP: lambda: text in {b"0", b"1"},
        headers.CONTEXT_BYTES: lambda: _is_number(text) and int(text) <= headers.MAX_CONTEXT_BYTES,
    }
    return judges[name]()


def _is_number(text: bytes) -> bool:
    return text.isdigit() and len(text) < 20 and int(text) < 2**31


def _may_be_shape(text: bytes) -> bool:
    if text.decode(errors="replace") in SHAPES:
        return False
    return all(_is_number(part.strip()) for part in text.split(b","))


def _may_be_sampling(text: bytes) -> bool:
    if text.decode("latin-1") in SAMPLINGS:
        return False
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict):
        return value is None
    members = cast("dict[str, object]", value)
    return not members
