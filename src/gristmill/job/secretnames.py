"""Names of secrets: whether what stands under a name of options, arguments or variables is likely one.

Words decide, not parts of them: `token`, `api_key` and `hfToken` name secrets; `max_tokens`, `tokenizer` and `monkey`
do not. Where the two are hard to tell apart, a name is one of a secret.
"""

from __future__ import annotations

import functools
import re

_WORD = re.compile(r"[^\W\d_]+")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# What no other word has in it, also where words are run together or apart: dbpassword, pass_word, apikeys.
_SURE = re.compile(
    r"passw|passphrase|passcode|pwd|secret(?!ar)|credential|conn(ection)?str(ing)?$"
    r"|(api|access|auth|account|bearer|client|private|refresh)(key|token)s?"
)
_SECRET = re.compile(
    r"token(?!i[sz]|s$|set|count|limit|size|len|type|id|wise|level|budget|per)"
    r"|auth(?!or(?!i[sz]ation)|entic(?!ation))"
    r"|key(id)?$|^sig$|^signature$|^bearer$|^jwt$|^pw$"
    r"|^(admin|db|ftp|http|ldap|login|mail|my|pg|proxy|redis|root|smtp|sql|ssh|user)?pass$"
)
_ENGLISH = re.compile(r"donkey|hockey|hotkey|jockey|lackey|monkey|turkey|turnkey|whiskey")
_BEFORE = {  # what precedes the word where it means something else: the token of a text, the key of a table
    "token": re.compile(r"audio|bos|cls|each|eos|first|image|last|mask|max|min|n|num|pad|per|sep|special|stop|unk"),
    "key": re.compile(r"foreign|group|join|order|partition|row|sort"),
    "pass": re.compile(r"band|first|high|low|max|multi|n|num|one|second|single|two"),
}
_ABOUT = re.compile(  # what follows the word where the value is only about a secret, or of many
    r"budget|col(umns?)?|counts?|dir|fields?|file|folder|index|len(gth)?|level|limits?|names?|path|ratio|sets?|size|"
    r"types?"
)
_AFTER = {"token": re.compile(r"embeddings?|ids?|mask"), "key": re.compile(r"frames|phrases|points|words")}  # likewise
_NONE = re.compile(r"(?!)")


@functools.lru_cache(maxsize=4096)
def names_secret(name: str) -> bool:
    """Whether the value under this name is likely a secret. `name` may be a path (`storage.token`), of which each part
    is looked at.
    """
    return any(_names_secret(_words(part)) for part in name.split("."))


def _words(name: str) -> list[str]:
    return [word.lower() for run in _WORD.findall(name) for word in _CAMEL.split(run)]


def _names_secret(words: list[str]) -> bool:
    if not words:
        return False
    if _SURE.search("".join(words)) and not _ABOUT.fullmatch(words[-1]):
        return True
    return any(_is_secret(word, words[:i], words[i + 1 :]) for i, word in enumerate(words))


def _is_secret(word: str, before: list[str], after: list[str]) -> bool:
    if not (_SECRET.search(word) or (word == "pat" and before)) or _ENGLISH.fullmatch(word):  # a personal access token
        return False
    if before and _BEFORE.get(word, _NONE).fullmatch(before[-1]):
        return False
    return not any(_ABOUT.fullmatch(w) or _AFTER.get(word, _NONE).fullmatch(w) for w in after)
