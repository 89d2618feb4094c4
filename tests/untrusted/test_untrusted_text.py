"""Text from outside is shown with its control characters as escapes, and cut."""

import json
from urllib.parse import quote

import pytest

from benchctl.untrusted import secrets
from benchctl.untrusted.secrets import (
    Redactor,
    copy_redacted,
    environment_redactor,
    is_ordinary,
    redacted,
)
from benchctl.untrusted.text import csv_cell, visible, visible_line


def test_control_sequences_are_shown_as_escapes_and_long_texts_are_cut() -> None:
    for text, shown in (
        ("a\x1b[31mred\x07\x9bno\u202ered", "a\\x1b[31mred\\x07\\x9bno\\u202ered"),
        ("Straße 東京\tعربي\n", "Straße 東京\tعربي\n"),
        ("a\r\nb\rc", "a\nb\\x0dc"),  # line ends of HTTP are line ends
    ):
        assert visible(text) == shown
    assert visible("x" * 50, 10) == "x" * 9 + "…"
    assert visible_line("\n" * 50, 10) == "\\n" * 4 + "\\…"
    assert visible_line("a\nb\tc") == "a\\nb\\tc"


def test_a_spreadsheet_gets_no_formula_and_no_control_character() -> None:
    for text in ("=cmd()", "+1+cmd", "-a", "@sum(1)", "\t=cmd()", "  =1", "\n@a", "＝cmd()"):  # noqa: RUF001
        assert csv_cell(text) == f"'{text}"
    for value in ("-1.5", "+3", "top_k=5", "", -2.5, None, "a@b"):
        assert csv_cell(value) == value
    assert csv_cell("\r=cmd()\x1b") == "\\x0d=cmd()\\x1b"


KEY = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0dF"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ==\n-----END RSA PRIVATE KEY-----"
PHRASE = "correct horse/battery & 'staple' ü"


@pytest.fixture
def known(monkeypatch, tmp_path):
    """A redactor that knows a token and a pass phrase."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", KEY)
    monkeypatch.setenv("TEAM_PASSWORD", PHRASE)
    return environment_redactor()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"token {KEY[:-1]}x.", "token [redacted: Hugging Face token]."),
        ("sk-ant-api03-abcdefghijklmnop and sk-abcdefghijklmnop", "[redacted: API key] and [redacted: API key]"),
        ("ghp_abcdefghijklmnop12 github_pat_11AAAAAAA0abcd", "[redacted: GitHub token] [redacted: GitHub token]"),
        ("glpat-abcdefghijkl12345678", "[redacted: GitLab token]"),
        ("xoxb-123456789012-abcdef", "[redacted: Slack token]"),
        ("id AKIAIOSFODNN7EXAMPLE,ASIAIOSFODNN7EXAMPLE", "id [redacted: AWS key],[redacted: AWS key]"),
        ("AIza" + "a1-_" * 8 + "xyz", "[redacted: Google key]"),
        ("nvapi-abcdefghijklmnopqrst", "[redacted: NVIDIA key]"),
        ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln", "jwt [redacted: JSON web token]"),
        ("Authorization: Bearer opensesame", "Authorization: Bearer [redacted: authorization]"),
        ("authorization=Basic dXNlcjpwYXNz", "authorization=Basic [redacted: authorization]"),
        ("{'Authorization': 'Bearer opensesame'}", "{'Authorization': 'Bearer [redacted: authorization]'}"),
        ("https://me:pw@host:1/x", "https://[redacted: password in a URL]@host:1/x"),
        ("GET /v1?api_key=abcd&n=1", "GET /v1?api_key=[redacted: value of a query]&n=1"),
        ("/m?a=1&X-Amz-Signature=0f9a", "/m?a=1&X-Amz-Signature=[redacted: value of a query]"),
        ("api_key=['opensesame']", "api_key=['[redacted: value of a secret name]']"),
        ("WANDB_API_KEY=" + "0f" * 20, "WANDB_API_KEY=[redacted: value of a secret name]"),
        ("run --api-key opensesame --port 1", "run --api-key [redacted: value of a secret name] --port 1"),
        (
            "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nb",
            "a\n[redacted: private key]\nb",
        ),
    ],
)
def test_keys_of_common_shapes_are_replaced_by_what_they_are(text, expected):
    assert Redactor().text(text) == expected


def test_ordinary_lines_of_logs_stay_as_they_are():
    for text in (
        "hf_overrides={}, hf_config_path=None, hf_text_config_of_the_model",
        "0f" * 20 + " is a commit, disk-aaaaaaaaaaaaaaaaaaaa a disk",
        "eos_token='<|endoftext|>', pad_token=None, max_tokens: 123456789, num_prompt_tokens=12345678",
        "api_key=None, hf_token: null, --api-key required, HF_TOKEN=/run/secrets/token",
        "http://127.0.0.1:8000/v1/models?limit=10&order=asc",
        "Engine 000: Avg prompt throughput: 123.4 tokens/s, Running: 12 reqs",
        "Bearer authentication is required; the token is missing",
    ):
        assert Redactor().text(text) == text


def test_known_values_are_replaced_by_the_name_of_their_variable_in_every_spelling(known):
    assert known.text(f"{KEY}!") == "[redacted: HF_TOKEN]!"
    for spelling in (PHRASE, quote(PHRASE), quote(PHRASE, safe=""), json.dumps(PHRASE)[1:-1]):
        assert known.text(f"x={spelling}.") == "x=[redacted: TEAM_PASSWORD]."


def test_the_token_of_the_hub_on_disk_is_known(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("an-enterprise-token-4711\n")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    environment = {"unlike": "any other environment of these tests"}  # the token is read once for each
    assert redacted("it is an-enterprise-token-4711", environment) == "it is [redacted: HF_TOKEN]"


def test_values_that_texts_hold_by_chance_are_not_replaced_and_short_ones_of_requests_as_words_alone(monkeypatch):
    for value in ("", "1", "true", "disabled", "12345678", "/run/agent.sock", "~/.token", "seven77"):
        assert is_ordinary(value)
        monkeypatch.setenv("SSH_AUTH_SOCK", value)
        assert redacted(f"is {value} here") == f"is {value} here"
    assert not is_ordinary("opensesame")
    sent = {"TEAM": "s3cr", "TINY": "ab"}  # values that requests carry
    assert redacted("key s3cr, s3crets, ab", sent) == "key [redacted: TEAM], s3crets, ab"


def test_texts_with_marks_have_no_more_secrets(known):
    text = f"api_key={KEY} Bearer {KEY} https://u:{KEY}@h ?token={KEY} {PHRASE}"
    once = known.text(text)
    assert KEY not in once
    assert known.text(once) == once


LOG = "\n".join(
    [
        f"HF_TOKEN={KEY} ok", f"x {PHRASE} y {PHRASE}", "Authorization: Bearer abcdefghij", "10%\r 20%\r 30%",
        PEM, "naïve\x00 \u2028 text",
        "sk-abcdefghijklmnop, password: opensesame", "https://u:pppp@h/?token=abcd", f"{KEY}",
    ]
).encode()  # fmt: skip


def copied(content, redactor, tmp_path):
    """A copy of a log without its secrets, and their number by label."""
    (tmp_path / "raw").write_bytes(content)
    counts = copy_redacted(tmp_path / "raw", tmp_path / "log", redactor)
    return (tmp_path / "log").read_bytes(), counts


@pytest.mark.parametrize("piece", [1, 3, 17, 200, 1 << 17])
def test_a_copy_in_pieces_of_any_size_loses_the_secrets_and_nothing_else(known, tmp_path, monkeypatch, piece):
    monkeypatch.setattr(secrets, "_PIECE_BYTES", piece)
    assert copied(LOG * 2, known, tmp_path) == known.content(LOG * 2)


def test_a_line_without_end_is_copied_in_pieces_without_its_secrets_and_bytes_that_are_no_text_as_they_are(
    known, tmp_path
):
    half = b"x" * 2_000_000
    expected = (half + b" [redacted: HF_TOKEN] " + half, {"HF_TOKEN": 1})
    assert copied(half + f" {KEY} ".encode() + half, known, tmp_path) == expected
    content = bytes(range(256)) * 1000
    assert copied(content, known, tmp_path) == (content, {})
