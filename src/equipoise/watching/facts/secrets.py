"""Masks keys, tokens and passwords before anything of a run's set-up is recorded.

A value is masked for its name (``api_key``), for its shape (``hf_…``), or because it
follows a flag of such a name on a command line. A word that is masked for nothing costs
a reader little; a key in a file that is passed on costs its owner much.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
SECRET = {
    *("password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets"),
    *("credential", "credentials", "authorization", "bearer", "cookie", "apikey"),
    *("apikeys", "accesskey", "privatekey", "secretkey", "authtoken", "dsn", "pat"),
}
"""Words that make a name one of a secret, wherever they stand in it."""
SECRET_PAIRS = {
    (first, last)
    for first in ("api", "access", "private", "auth", "secret", "account", "ssh")
    for last in ("key", "keys", "token", "tokens")
}
LAST = {"key", "keys", "token", "tokens"}
"""Words that do so at the end of a name, where the value is a text."""
OF_TEXT = {
    *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "image", "audio", "video"),
    *("special", "start", "end", "begin", "prompt", "text", "sort", "input", "output"),
    *("label", "batch", "column", "dict", "state", "hash", "stop", "boi", "eoi", "new"),
}
"""Words beside which ``token`` and ``key`` are those of a text or a table."""
OF_HASHES = {
    *("commit", "revision", "rev", "sha", "sha1", "sha256", "hash", "md5", "git"),
    *("checksum", "digest", "fingerprint", "blob"),
}
SHAPES = re.compile(
    r"""(
    \b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{12,}
    | \bhf_[A-Za-z0-9]{8,}
    | \bgh[pousr]_[A-Za-z0-9]{16,}
    | \bgithub_pat_\w{16,}
    | \bgl[a-z]{2,4}-[\w-]{16,}
    | \bxox[a-z]-[\w-]{8,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{12,}
    | \bAIza[\w-]{24,}
    | \bya29\.[\w-]+
    | \beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?
    | -----BEGIN[ A-Z]*KEY-----.*
    | (?<=Bearer\s)\S+ | (?<=Basic\s)\S+
    | (?<=://)[^/\s@]+(?=@)
    )""",
    re.VERBOSE | re.DOTALL,
)
ASSIGNED = re.compile(r"([\w.-]+)(\s*[=:]\s*)([^\s&;,]+)")
"""``name=value`` inside a text, such as a query or a connection string."""
LONG_HEX = re.compile(r"\b[0-9a-fA-F]{32,}\b")
LONG = re.compile(r"[A-Za-z0-9+/_=-]{28,}")


def masked(value: Any, name: str = "") -> Any:
    """Return a JSON value with the secrets in it masked.

    >>> masked({"lr": 3e-4, "hf_token": "abc", "pad_token": "<pad>"})
    {'lr': 0.0003, 'hf_token': '***', 'pad_token': '<pad>'}
    """
    if isinstance(value, Mapping):
        return {
            _masked_text(str(key), ""): masked(item, _inherited(name, str(key)))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if isinstance(value, bytes):
        return MASK
    if _is_secret(name, value):
        return MASK
    return _masked_text(value, name) if isinstance(value, str) else value


def _inherited(name: str, key: str) -> str:
    """Return the name of what a mapping holds: of secrets, all of it is secret."""
    return name if _is_secret(name, "text") else key


def masked_command(words: Sequence[str]) -> list[str]:
    """Return a command line with its secrets masked.

    >>> masked_command(["train.py", "--api-key", "abc", "--lr=1", "--token=x"])
    ['train.py', '--api-key', '***', '--lr=1', '--token=***']
    """
    found: list[str] = []
    flag = ""
    for word in words:
        if flag and not word.startswith("-"):
            found.append(masked(word, flag))
            flag = ""
            continue
        flag, equals, value = word.partition("=")
        if equals:
            found.append(f"{_masked_text(flag, '')}={masked(value, flag)}")
            flag = ""
        else:
            found.append(_masked_text(word, ""))
            flag = flag if word.startswith("-") else ""
    return found


def _words(name: str) -> list[str]:
    """Return the words of a name: ``hfApiKey``, ``HF_API_KEY`` and ``hf-api-key``."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return re.findall(r"[a-z]+|\d+", apart.lower())


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    words = _words(name)
    pairs = {*zip(words, words[1:], strict=False)}
    if {*words} & SECRET or pairs & SECRET_PAIRS:
        return bool(value != "")
    named = bool(words) and words[-1] in LAST and not {*words} & OF_TEXT
    return named and isinstance(value, str) and value != ""


def _masked_text(text: str, name: str) -> str:
    found = SHAPES.sub(MASK, text)
    found = ASSIGNED.sub(_assigned, found)
    if not {*_words(name)} & OF_HASHES:
        found = LONG_HEX.sub(MASK, found)
    return LONG.sub(lambda match: MASK if _is_random(match[0]) else match[0], found)


def _assigned(match: re.Match[str]) -> str:
    name, equals, value = match.groups()
    return f"{name}{equals}{MASK if _is_secret(name, value) else value}"


def _is_random(text: str) -> bool:
    """Return whether a long word looks drawn: many kinds of letters, often changing.

    >>> _is_random("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    True
    >>> _is_random("Llama-3-8B-Instruct-lr3e-4-warmup-2000")
    False
    """
    parts = re.split(r"[-_/]", text)
    if len(text) / len(parts) < 8:
        return False  # words of a name, or of a path
    kinds = [_kind(letter) for letter in text if letter.isalnum()]
    if len(kinds) < 20 or len({*kinds}) < 3:
        return False
    changes = sum(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    counts = Counter(text).values()
    bits = -sum(n / len(text) * math.log2(n / len(text)) for n in counts)
    return changes / len(kinds) > 0.3 and bits > 3.8


def _kind(letter: str) -> str:
    return "digit" if letter.isdigit() else "upper" if letter.isupper() else "lower"
