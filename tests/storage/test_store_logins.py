"""S3 as companies log in to it: each way by which boto finds credentials; some expire while shards are read.

Roles are those of moto's STS and of its metadata of an instance; what moto lacks, the server below answers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha1
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from object_store import ObjectStore, serving

from tarshards import Remote, ShardWriter, Stream
from tarshards.errors import OpenError
from tarshards.storage.location import Location
from tarshards.storage.opening import open_url

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
EXPIRED = "400 Bad Request", "ExpiredToken"  # as S3 answers a token that has expired
TOO_LATE = "403 Forbidden", "AccessDenied"  # and a signature
KEYS = [f"{number:03d}" for number in range(120)]


@dataclass(repr=False)
class Company(ObjectStore):
    """moto behind a guard, which knows the credentials that it gave: each time others, valid for *minutes*.

    It refuses those that have *expired*, and with *payer* who does not say that he pays.
    """

    minutes: int = 60
    given: list[str] = field(default_factory=list)
    expired: set[str] = field(default_factory=set)
    answer: tuple[str, str] = EXPIRED
    refused: int = 0
    payer: bool = False
    shown: set[tuple[str, bool]] = field(default_factory=set)  # the keys of requests to the bucket; with a token?

    def give(self) -> dict[str, Any]:
        self.given.append(f"GIVEN{len(self.given)}")
        until = datetime.now(UTC) + timedelta(minutes=self.minutes)
        return {
            "Version": 1,
            "AccessKeyId": self.given[-1],
            "SecretAccessKey": "s3cret",
            "Token": "t0ken",
            "SessionToken": "t0ken",
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def wrapped(self, app: Any) -> Any:
        store = super().wrapped(app)

        def serve(environ: dict[str, Any], start: Any) -> Any:
            path, query = environ["PATH_INFO"], parse_qs(environ["QUERY_STRING"])
            login, token = environ.get("HTTP_AUTHORIZATION", ""), environ.get("HTTP_X_AMZ_SECURITY_TOKEN")
            if path == "/pod" and login == "of the pod":
                return send(start, "200 OK", "application/json", json.dumps(self.give()))
            if path == "/federation/credentials" and query["role_name"] == ["trainer"]:
                # WSGI drops the header of the token, whose name has underscores.
                told = self.give()
                words = {name[0].lower() + name[1:]: told[name] for name in told} | {"expiration": 4102444800000}
                return send(start, "200 OK", "application/json", json.dumps({"roleCredentials": words}))
            if path.startswith("/bucket"):
                key = (query.get("X-Amz-Credential") or re.findall("Credential=([^,]+)", login))[0].partition("/")[0]
                self.shown.add((key, bool(token or query.get("X-Amz-Security-Token"))))
                if key in self.expired:
                    self.refused += 1
                    return send(start, self.answer[0], "application/xml", refusal(self.answer[1]))
                if self.payer and environ.get("HTTP_X_AMZ_REQUEST_PAYER") != "requester":
                    return send(start, "403 Forbidden", "application/xml", refusal("AccessDenied"))
            return store(environ, start)

        return serve


def refusal(code: str) -> str:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as the test says</Message></Error>"


def send(start: Any, status: str, kind: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", kind), ("Content-Length", str(len(text)))])
    return [text.encode()]


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with serving(Company()) as server:
        yield server


@pytest.fixture
def company(server, monkeypatch, tmp_path):
    """An empty bucket in an environment that knows no credentials, only the server."""
    import fsspec
    import s3fs

    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(fsspec.config.conf, "s3", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    server.minutes, server.answer, server.refused, server.payer = 60, EXPIRED, 0, False
    server.expired.clear()
    server.reset()
    server.given.clear()
    server.shown.clear()
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    s3fs.S3FileSystem.clear_instance_cache()


Setting = Callable[[Company, Path, Any], None]  # what a company sets: variables, and files in a folder


def web_identity(company: Company, folder: Path, variables: Any) -> None:
    """EKS, by a service account."""
    (folder / "token").write_text("of the service account")
    variables.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(folder / "token"))
    variables.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")


def instance_role(company: Company, folder: Path, variables: Any) -> None:
    variables.delenv("AWS_EC2_METADATA_DISABLED")
    variables.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", company.url)


def pod_identity(company: Company, folder: Path, variables: Any) -> None:
    """ECS, and EKS by its agent."""
    (folder / "token").write_text("of the pod")
    variables.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{company.url}/pod")
    variables.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(folder / "token"))


def sso_profile(company: Company, folder: Path, variables: Any) -> None:
    """What ``aws configure sso`` and ``aws sso login`` write."""
    (folder / "config").write_text(
        "[profile trainer]\nsso_session = company\nsso_account_id = 123456789012\nsso_role_name = trainer\n"
        "[sso-session company]\nsso_start_url = https://company.awsapps.com/start\nsso_region = us-east-1\n"
    )
    token = {"accessToken": "of the browser", "expiresAt": "2100-01-01T00:00:00Z"}
    (folder / f"{sha1(b'company').hexdigest()}.json").write_text(json.dumps(token))
    variables.setattr("botocore.tokens.SSOTokenProvider._SSO_TOKEN_CACHE_DIR", str(folder))  # else that of the home
    variables.setenv("AWS_PROFILE", "trainer")


def role_of_a_profile(company: Company, folder: Path, variables: Any) -> None:
    (folder / "credentials").write_text("[base]\naws_access_key_id = me\naws_secret_access_key = s3cret\n")
    role = "role_arn = arn:aws:iam::123456789012:role/trainer\nsource_profile = base\n"
    (folder / "config").write_text(f"[profile trainer]\n{role}")
    variables.setenv("AWS_PROFILE", "trainer")


def credential_process(company: Company, folder: Path, variables: Any) -> None:
    (folder / "given.json").write_text(json.dumps(company.give()))
    program = f"{sys.executable} -c 'print(open(\"{folder}/given.json\").read())'"
    (folder / "config").write_text(f"[default]\ncredential_process = {program}\n")


def session_token(company: Company, folder: Path, variables: Any) -> None:
    told = company.give()
    variables.setenv("AWS_ACCESS_KEY_ID", told["AccessKeyId"])
    variables.setenv("AWS_SECRET_ACCESS_KEY", told["SecretAccessKey"])
    variables.setenv("AWS_SESSION_TOKEN", told["SessionToken"])


LOGINS: dict[Setting, str] = {  # a setting, and the pattern of the keys that it gives
    web_identity: "ASIA.*",
    instance_role: "test-key",
    pod_identity: "GIVEN0",
    sso_profile: "GIVEN0",
    role_of_a_profile: "ASIA.*",
    credential_process: "GIVEN0",
    session_token: "GIVEN0",
}


def write() -> None:
    with ShardWriter("s3://bucket/s-%d.tar", max_samples=40, index=True) as writer:
        for key in KEYS:
            writer.write({"__key__": key, "bin": key.encode() * 1000})


def check(samples: Any) -> None:
    """Check that all samples came, each once, with what was written."""
    came = {sample["__key__"]: sample["bin"] for sample in samples}
    assert came == {key: key.encode() * 1000 for key in KEYS}


@pytest.mark.parametrize("setting", LOGINS, ids=lambda setting: setting.__name__)
def test_each_way_to_log_in(company, tmp_path, monkeypatch, setting):
    """Writing, opening and reading show the same temporary credentials, and ask for them once."""
    setting(company, tmp_path, monkeypatch)
    write()
    check(Stream.from_shards("s3://bucket/s.shards.json", shuffle=True))
    check(Stream.from_shards("s3://bucket/s-*.tar", index=False))
    assert len(company.shown) == 1
    ((key, has_token),) = company.shown
    assert re.fullmatch(LOGINS[setting], key)
    assert has_token


def test_who_cannot_log_in_is_told_so(company):
    with pytest.raises(OpenError, match=r"^s3://bucket/a\.tar: .*credentials"):
        open_url("s3://bucket/a.tar")


@pytest.mark.parametrize("answer", [EXPIRED, TOO_LATE], ids=lambda answer: answer[1])
@pytest.mark.parametrize("options", [{"index": False}, {"index": True, "shuffle": True}], ids=["stream", "planned"])
def test_credentials_that_expire_in_mid_epoch(company, tmp_path, monkeypatch, answer, options):
    """A role's are valid for minutes: what was signed with the old ones is refused, and signed with new ones."""
    pod_identity(company, tmp_path, monkeypatch)
    write()
    company.minutes, company.answer = 5, answer
    came = []
    for sample in Stream.from_shards("s3://bucket/s-{0..2}.tar", remote=Remote(2, ahead=1 << 14), **options):
        came.append(sample)
        if len(came) % 30 == 10:
            company.expired.update(company.given)
    assert len(came) == len(KEYS)
    check(came)
    assert company.refused


def test_credentials_in_a_file_that_is_written_again(company, tmp_path):
    """As programs do that log in for all others: the file is read again when the store refuses its credentials."""

    def renew() -> None:
        told = company.give()
        (tmp_path / "credentials").write_text(
            f"[default]\naws_access_key_id = {told['AccessKeyId']}\naws_secret_access_key = s3cret\n"
            "aws_session_token = t0ken\n"
        )

    renew()
    write()
    came = []
    for sample in Stream.from_shards("s3://bucket/s.shards.json", shuffle=True, remote=Remote(2, ahead=1 << 14)):
        came.append(sample)
        if len(came) == 10:
            company.expired.update(company.given)
            renew()
    check(came)
    assert len(came) == len(KEYS)
    assert company.refused
    company.expired.update(company.given)
    with pytest.raises(OpenError, match=r"^s3://bucket/s-0\.tar: 400 Bad Request, ExpiredToken: as the test says"):
        open_url("s3://bucket/s-0.tar")
    renew()
    check(Stream.from_shards("s3://bucket/s-{0..2}.tar", index=False))


def test_who_pays_for_requests(company, tmp_path, monkeypatch):
    import fsspec

    session_token(company, tmp_path, monkeypatch)
    company.payer = True
    with monkeypatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"requester_pays": True})  # FSSPEC_S3_REQUESTER_PAYS
        write()
    payer = Remote(storage_options={"requester_pays": True})
    check(Stream.from_shards("s3://bucket/s.shards.json", shuffle=True, remote=payer))
    check(Stream.from_shards("s3://bucket/s-*.tar", index=False, remote=payer))
    with pytest.raises(OpenError, match=r"^s3://bucket/s-0\.tar: 403 Forbidden, AccessDenied"):
        open_url("s3://bucket/s-0.tar")


@pytest.mark.parametrize(
    ("style", "begin"), [("auto", "https://minio.example/bucket/"), ("virtual", "https://bucket.minio.example/")]
)
def test_where_other_stores_have_their_buckets(company, tmp_path, monkeypatch, style, begin):
    """In the path, as MinIO and R2, or in the name of the host, as some require."""
    session_token(company, tmp_path, monkeypatch)
    (tmp_path / "config").write_text(f"[default]\ns3 =\n  addressing_style = {style}\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://minio.example")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    url, _ = Location.of("s3://bucket/d/a.tar").address().target
    assert url.startswith(f"{begin}d/a.tar?")


def test_the_region_of_r2(company, tmp_path, monkeypatch):
    session_token(company, tmp_path, monkeypatch)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "auto")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://account.r2.cloudflarestorage.com")
    url, _ = Location.of("s3://bucket/a.tar").address().target
    assert url.startswith("https://account.r2.cloudflarestorage.com/bucket/a.tar?")
    assert "%2Fauto%2Fs3%2Faws4_request" in url
