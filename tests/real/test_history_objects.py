"""The store in object storage, against a real S3 server (moto): the same layout, the same answers."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gridagent.journal import Journal
from gridctl.history import History, HistoryError
from gridctl.history.compact import Place, compact
from gridctl.history.stats import stats
from gridctl.history.store import StoreError, store_at
from gridctl.home import Home
from gridctl.model.policy import Kept

pytest.importorskip("moto.server", reason="pip install 'moto[server,s3]': 80 packages, so not part of [dev]")
obstore = pytest.importorskip("obstore", reason="pip install 'gridctl[objects]'")

SERVE = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    server.kill()
    server.communicate()


@pytest.fixture
def place(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    told = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
    for name, value in {**told, "ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    bucket = tmp_path.name.replace("_", "-")
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")):
        pass
    return Place.of(Home.at(tmp_path), Kept(store=f"s3://{bucket}/a/history"))


def fill(place: Place, first: int = 0) -> None:
    with Journal(place.journal) as log:
        for number in range(first, first + 30):
            log.append("incident", "x", {"incident": f"i{number}", "state": "open"})


def test_sealed_there_and_read_from_there(place: Place) -> None:
    fill(place)
    before = History(place.journal).query("FROM incidents ORDER BY ALL")
    assert compact(place, Kept()).sealed_seq == 30
    for path in place.journal.glob("*.jsonl"):
        path.rename(path.with_suffix(".away"))
    history = History(place.journal, place.store)
    assert history.query("FROM incidents ORDER BY ALL") == before
    for path in place.journal.glob("*.away"):
        path.rename(path.with_suffix(".jsonl"))
    fill(place, 30)
    assert compact(place, Kept()).sealed_seq == 60
    assert history.query("SELECT count(*) FROM incidents")[1] == [(60,)]
    assert stats(place, Kept()).problem == ""


def test_only_the_history_is_to_be_read(place: Place) -> None:
    fill(place)
    compact(place, Kept())
    url = place.store.url("").removesuffix("a/history/")
    obstore.put(obstore.store.from_url(url), "secret.txt", b"secret")
    with pytest.raises(HistoryError, match="Permission"):
        History(place.journal, place.store).query(f"FROM read_text('{url}secret.txt')")


def test_the_second_of_two_that_compact_is_told(place: Place) -> None:
    fill(place)
    mine, other = store_at(place.store.where), store_at(place.store.where)
    theirs = other.catalog()
    compact(Place(place.journal, place.spool, mine), Kept())
    with pytest.raises(StoreError, match="it was first"):
        other.replace(theirs)
    assert other.catalog().sealed_seq == 30


def test_a_damaged_object_is_made_anew(place: Place) -> None:
    fill(place)
    compact(place, Kept())
    path = place.store.catalog().of("records")[0].path
    obstore.put(obstore.store.from_url(place.store.where), path, b"PAR1 nothing PAR1")
    assert len(History(place.journal, place.store).query("FROM records")[1]) == 30
    assert compact(place, Kept(), rebuild=True).damaged == (place.store.url(path),)
    assert len(History(place.journal, place.store).query("FROM records")[1]) == 30


def test_a_bucket_that_is_not_there_is_told(place: Place) -> None:
    fill(place)
    with pytest.raises(StoreError, match="no-such-bucket"):
        compact(Place(place.journal, place.spool, store_at("s3://no-such-bucket/x")), Kept())
