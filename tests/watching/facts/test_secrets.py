"""No key, token or password reaches a run file; what is none stays readable."""

import json
from pathlib import Path

import pytest

import equipoise
from equipoise.watching.facts.secrets import MASK, masked, masked_command
from tests.watching.models import TinyModel, trained

HIDDEN = "nOtForYourEyes"

NAMES = [
    *("password", "PASSWORD", "db_password", "passwd", "pwd", "rootPwd", "passphrase"),
    *("secret", "client_secret", "clientSecret", "AWS_SECRET_ACCESS_KEY", "secrets"),
    *("token", "hf_token", "HF_TOKEN", "hub-token", "authToken", "access_token"),
    *("api_key", "apiKey", "APIKEY", "WANDB_API_KEY", "openai.api.key", "ssh_key"),
    *("private_key", "key", "license_key", "credentials", "Authorization", "cookie"),
    *("sentry_dsn", "api_keys", "tokens", "use_auth_token", "bearer"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_secret_masks_what_it_holds(name: str) -> None:
    for value in (HIDDEN, [HIDDEN, "x"], {"a": HIDDEN}, HIDDEN.encode()):
        assert HIDDEN not in json.dumps(masked({name: {"v": value}["v"]}))
    assert HIDDEN not in json.dumps(masked({"hub": {"login": {name: HIDDEN}}}))
    assert HIDDEN not in " ".join(masked_command(["x.py", f"--{name}", HIDDEN]))
    assert HIDDEN not in " ".join(masked_command(["x.py", f"--{name}={HIDDEN}"]))
    assert HIDDEN not in masked(f"mode=fast;{name}={HIDDEN};n=3", "connection")


VALUES = [
    "sk-proj-Zm9vYmFyYmF6cXV4MTIzNDU2",
    "hf_abcdefghijklmnopqrstuvwxyzABCD",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuv",
    "glpat-xxxxxxxxxxxxxxxxxxxx",
    "xoxb-123456789012-abcdefghij",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_def-ghi",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "0123456789abcdef0123456789abcdef01234567",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("around", ["{}", "see {} here", "https://x.io/?q={}"])
def test_a_value_that_looks_like_a_secret_is_masked(value: str, around: str) -> None:
    given = around.format(value)
    assert value not in json.dumps(masked({"note": given, "list": [given]}))
    assert value not in " ".join(masked_command(["x.py", given, "--note", given]))


def test_of_an_address_only_the_login_is_masked() -> None:
    found = masked("postgres://ann:pw123@db.example:5432/runs", "store")
    assert found == f"postgres://{MASK}@db.example:5432/runs"


LEGAL = {
    "pad_token": "<pad>",
    "eos_token_id": 2,
    "max_new_tokens": 128,
    "tokens_per_batch": 524288,
    "num_key_value_heads": 8,
    "key_dim": 64,
    "sort_key": "length",
    "tokenizer": "gpt2",
    "use_cache": True,
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "name": "Llama-3-8B-Instruct-lr3e-4-warmup-2000-seed-1",
    "path": "/data/fineweb/sample-10BT/000_00000.parquet",
    "target_modules": ["q_proj", "k_proj", "v_proj"],
    "secret": "",
    "tie_word_embeddings": False,
}


def test_ordinary_options_stay_readable() -> None:
    assert masked(LEGAL) == LEGAL
    command = ["train.py", "--lr", "3e-4", "--tokenizer=gpt2", "-v", "--keys", "-x"]
    assert masked_command(command) == command


def test_nothing_secret_is_in_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--hub_token", HIDDEN, "--lr", "1"])
    run = tmp_path / "a.eqp"

    class Configured(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"width": 8, "hub_token": HIDDEN}

    trained(Configured, run=run, steps=3, info={"login": {"password": HIDDEN}})
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert HIDDEN.encode() not in stored
    setup = equipoise.open_run(run).card.sections["setup"]
    assert setup["command"] == f"train.py --hub_token {MASK} --lr 1"
    assert setup["configuration"] == {"width": 8, "hub_token": MASK}
