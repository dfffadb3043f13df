"""Which names are those of secrets."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.job.secretnames import names_secret

SECRETS = """
    token key secret secrets password passwd passphrase passcode pass pwd pw auth authorization authentication oauth2
    credential credentials signature sig bearer jwt api_key apikey apikeys api_keys API_KEY x-api-key apiKey APIKey
    access_key accessKeyId access_key_id aws_secret_access_key aws_session_token account_key accountkey primary_key
    hf_token hfToken HF_TOKEN hftoken mytokenprod github_token token_prod TOKEN_1 token2 api_tokens access_tokens
    db_password dbpassword db-password password2 PGPASSWORD pgpass db_pass smtp_pass user_pw pass_word pass_phrase
    client_secret secret_word openai_key openaikey OPENAIKEY keyid key_id private_key basic_auth authheader
    storage.token model.api_key headers.Authorization github_pat connection_string conn_str sas_token session_key
    token_value key_prod secret_set_prod Passwort credentials.user
"""
OTHERS = """
    tokens max_tokens maxTokens tokens_per_minute min_tokens batch_tokens token_set token_count token_limit token_budget
    tokenizer tokenise tokenization tokenizer_name detokenizer tokenset subtokens keep_tokens max_token cost_per_token
    pad_token eos_token pad_token_id token_id token_ids token_type_ids token_embeddings token_file
    monkey donkey turkey hockey monkeys keys keyword keywords keyboard keyed key_column key_columns key_words sort_key
    partition_key foreign_key keep_keys primary author authors co_author authority authentic secretary secretariat
    password_file credentials_file secret_name passes first_pass bypass compass passenger passage pattern pat
    design sigma significance signal config threshold size name text model.args.max_tokens x_1 id 1 _ - .
"""
FREE = st.text(string.ascii_lowercase, min_size=1, max_size=6).filter(lambda word: not names_secret(word))
TELLING = ("token", "secret", "password", "passwd", "api_key", "apikey", "access_key", "credentials", "auth")


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_of_secrets(name: str) -> None:
    """What people call secrets, however they write words together."""
    assert names_secret(name)


@pytest.mark.parametrize("name", OTHERS.split())
def test_names_of_other_things(name: str) -> None:
    """What only has the letters of such a name in it, or is about a secret."""
    assert not names_secret(name)


@given(st.text(string.ascii_lowercase, min_size=4, max_size=8), st.sampled_from(TELLING), st.sampled_from("_-. "))
def test_no_secret_gets_through(owner: str, what: str, between: str) -> None:
    """Whose secret it is does not matter, nor how the two are put together: with a sign, as camels are, in capitals."""
    if owner in ("each", "first", "image", "audio", "last", "mask", "special", "stop"):  # tokens of a text
        return
    camel = owner + "".join(part.capitalize() for part in what.split("_"))
    for name in (f"{owner}{between}{what}", camel, f"{owner}_{what}".upper(), f"{owner}_{what}_2"):
        assert names_secret(name), name


@given(FREE, FREE)
def test_words_that_say_nothing(one: str, two: str) -> None:
    """Words that name no secret by themselves name none side by side, but for those made of two words."""
    joined = one + two
    if not any(part in joined for part in ("pass", "pwd", "secret", "credential", "conn", "key", "token")):
        assert not names_secret(f"{one}_{two}")
