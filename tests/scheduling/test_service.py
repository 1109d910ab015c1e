import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from typer.testing import CliRunner

import baechi
from baechi import (
    Cluster,
    Constraints,
    InputError,
    Link,
    Op,
    OpGraph,
    Placement,
    ReservationError,
    Tensor,
    Topology,
)
from baechi.cli.commands import app as command
from baechi.scheduling.claims import Claim, Wish
from baechi.scheduling.client import Client
from baechi.scheduling.decision import decide
from baechi.scheduling.ledger import Ledger
from baechi.scheduling.messages import Limits, ServiceError, decode, encode
from baechi.scheduling.service import create_app
from baechi.scheduling.snapshot import Site, Snapshot
from baechi.scheduling.whatif import whatif
from baechi.storage.serialization import dumps

LINK = Link(10, 10**9)
GRID = Topology.grid(2, 2, 2, "1GiB", node_link=LINK, switch_link=LINK, site_link=LINK)
GRAPH = OpGraph(
    (*(Op(f"op{i}", 1000, persistent_bytes=10) for i in range(4)), Op("sum", 10)),
    tuple(Tensor(i, (4,), 1) for i in range(4)),
)
LIMITS = Limits(body_bytes=30_000, message_bytes=20_000, ops=50, seconds=20)


@pytest.fixture
def start(tmp_path):
    """Starts a real server on the test's ledger; none outlives the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *words: stack.enter_context(Server(tmp_path, *words))


@pytest.fixture(scope="module")
def shared():
    """A service whose ledger tests only look at."""
    with TestClient(create_app(Ledger(GRID), workers=1, limits=LIMITS)) as web:
        yield web


def post(web, path, body, status=200):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = web.post(path, content=body)
    assert answer.status_code == status, answer.text
    raw = answer.json()
    assert raw["schema"] == 1
    return raw


def upload(web, graph=GRAPH):
    return post(web, "/v1/graphs", dumps(graph).encode())["digest"]


def test_a_graph_is_known_by_its_digest_and_solved_as_in_python(shared):
    digest = upload(shared)
    assert digest == GRAPH.digest == upload(shared)
    wish = Wish(same="node", slack_milli=100, constraints=Constraints(max_devices=3))
    body = {"schema": 1, "graph": digest, "wish": {"same": "node", "slack_milli": 100,
            "constraints": {"max_devices": 3}}}  # fmt: skip
    answer = post(shared, "/v1/solve", body)
    decision = decide(GRAPH, Snapshot(Site.of(GRID)), wish)
    assert answer["status"] == "placed"
    expected = json.loads(encode(decision))
    del expected["schema"]
    assert answer["decision"] == expected
    assert [claim["device"] for claim in answer["claims"]] == list(decision.devices)


def test_a_path_or_method_that_is_not_there_is_a_failure_like_others(shared):
    for path, status in (("/v1/nothing", 404), ("/v1/solve", 405)):
        answer = shared.get(path)
        assert (answer.status_code, answer.json()["error"]) == (status, "no-route")
        assert f"no GET {path};" in answer.json()["message"]


def test_the_same_request_has_the_same_bytes(shared):
    body = json.dumps({"schema": 1, "graph": upload(shared)}).encode()
    whatif_body = json.dumps({"schema": 1, "graph": GRAPH.digest, "up_to": 3}).encode()
    for path, sent in (("/v1/solve", body), ("/v1/whatif", whatif_body)):
        answers = {shared.post(path, content=sent).content for _ in range(3)}
        assert len(answers) == 1
    assert shared.get("/v1/snapshot").content == shared.get("/v1/snapshot").content


def test_what_does_not_fit_is_an_answer_and_what_if_says_what_is_missing(shared):
    large = OpGraph((Op("a", 5, persistent_bytes=2**31),))
    digest = upload(shared, large)
    answer = post(shared, "/v1/solve", {"schema": 1, "graph": digest})
    assert answer["status"] == "infeasible"
    assert "decision" not in answer
    answer = post(shared, "/v1/whatif", {"schema": 1, "graph": digest})
    assert answer["shortage"]["extra_bytes"] == 2**30
    assert answer["alternatives"] == []


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/solve", b"", 422, "JSON"),
        ("/v1/solve", b"{", 422, "JSON"),
        ("/v1/solve", b"\xff\xfe", 422, "JSON"),
        ("/v1/solve", b"[]", 422, "one JSON object"),
        ("/v1/solve", b'{"schema": 1, "schema": 1}', 422, "twice"),
        ("/v1/solve", b'{"schema": NaN}', 422, "NaN"),
        ("/v1/solve", {"graph": "a"}, 422, "schema is None; this service speaks 1"),
        ("/v1/solve", {"schema": 2, "graph": "a"}, 422, "schema is 2"),
        ("/v1/solve", {"schema": True, "graph": "a"}, 422, "schema is True"),
        ("/v1/solve", {"schema": 1}, 422, "graph is missing"),
        ("/v1/solve", {"schema": 1, "graph": 5}, 422, "graph is 5"),
        ("/v1/solve", {"schema": 1, "graph": "a", "wishes": {}}, 422, "wishes is unknown"),
        ("/v1/solve", {"schema": 1, "graph": "a", "wish": {"same": "rack"}}, 422, "same is"),
        ("/v1/solve", {"schema": 1, "graph": "0" * 64}, 404, "no graph has digest"),
        ("/v1/whatif", {"schema": 1, "graph": "a", "up_to": 9999}, 422, "the limit is 1024"),
        ("/v1/whatif", {"schema": 1, "graph": "a", "up_to": -1}, 422, "up_to"),
        ("/v1/whatif", {"schema": 1, "graph": "a", "after": ["j"] * 99}, 422, "at most 64"),
        ("/v1/whatif", b"[" * 20_000, 422, "nested too deeply"),
        ("/v1/reserve", b" " * 20_001, 413, "more than 20000 bytes"),
        ("/v1/graphs", b" " * 30_001, 413, "more than 30000 bytes"),
        ("/v1/reserve", b'"' + b'\\"' * 9_000, 422, "JSON"),
        ("/v1/release", b'{"schema": 1, "job": "\\ud800"}', 422, "Unicode"),
        ("/v1/release", {"schema": 1, "job": "j" * 513}, 422, "at most 512"),
        ("/v1/release", {"schema": 1, "job": "j", "request_id": "i" * 513}, 422, "at most 512"),
        ("/v1/reserve", b'{"schema": 1, "job": "a", "claims": [], "version": 1' + b"0" * 400 + b"}",
         422, "64 bits"),
        ("/v1/graphs", b"[" * 30_000, 422, "nested too deeply"),
        ("/v1/graphs", b"{}", 422, "no Baechi file"),
        ("/v1/graphs", b"\xff", 422, "UTF-8"),
        ("/v1/graphs", dumps(GRID).encode(), 422, "OpGraph is wanted"),
        ("/v1/graphs", dumps(OpGraph([Op(f"o{i}", 1) for i in range(51)])).encode(), 422,
         "51 ops; the limit is 50"),
        ("/v1/reserve", {"schema": 1, "job": "a", "claims": []}, 422, "no claims"),
        ("/v1/reserve", {"schema": 1, "job": "", "claims": []}, 422, "job"),
        ("/v1/reserve", {"schema": 1, "job": "a", "claims": [{"device": "x", "memory_bytes": 1}]},
         422, "unknown"),
        ("/v1/release", {"schema": 1, "job": "a"}, 404, "no reservation"),
        ("/v1/solve", b'{"schema": 1, "graph": "a", "\\ud800": 1}', 422, "unknown"),
        ("/v1/graphs", b'{"format": "baechi", "type": "OpGraph", "version": 1, "value": '
         b'{"ops": [{"\\ud800": 1}]}}', 422, "unknown"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_with_a_reason(shared, path, body, status, says):
    answer = post(shared, path, body, status)
    assert says in answer["message"]
    assert set(answer) == {"schema", "error", "message"}


def test_wrong_constraints_are_refused_by_name(shared):
    digest = upload(shared)
    for rules, says in (({"excluded": ["gpu"]}, "'gpu'"), ({"pins": {"x": "node0/0"}}, "'x'")):
        body = {"schema": 1, "graph": digest, "wish": {"constraints": rules}}
        assert says in post(shared, "/v1/solve", body, 422)["message"]
    body = {"schema": 1, "graph": digest, "after": ["nobody"]}
    assert "nobody" in post(shared, "/v1/whatif", body, 404)["message"]


def test_reserve_and_release_are_granted_once_per_request_id():
    book = Ledger(GRID)
    with TestClient(create_app(book, workers=1)) as web:
        claim = {"device": "node0/0", "memory_bytes": 100, "share_milli": 300}
        body = {"schema": 1, "job": "a", "request_id": "r1", "version": 0, "claims": [claim]}
        first = web.post("/v1/reserve", json=body)
        assert first.status_code == 200
        assert web.post("/v1/reserve", json=body).content == first.content
        assert book.snapshot().version == 1
        refused = post(web, "/v1/reserve", {**body, "job": "b"}, 409)
        assert refused["error"] == "duplicate"
        stale = post(web, "/v1/reserve", {**body, "job": "b", "request_id": "r2"}, 409)
        assert stale["error"] == "stale"
        claim = {**claim, "memory_bytes": 2**30}
        more = {**body, "job": "b", "request_id": "r3", "version": None, "claims": [claim]}
        assert post(web, "/v1/reserve", more, 409)["error"] == "capacity"
        free = web.get("/v1/snapshot").json()
        assert free["free"][0] == {
            "device": {"name": "node0/0", "memory_bytes": 2**30 - 100, "speed": 0.7},
            "share_milli": 700, "node": "node0", "switch": "switch0",
        }  # fmt: skip
        assert [job["job"] for job in free["jobs"]] == ["a"]
        gone = web.post("/v1/release", json={"schema": 1, "job": "a", "request_id": "r4"})
        again = web.post("/v1/release", json={"schema": 1, "job": "a", "request_id": "r4"})
        assert gone.content == again.content
        assert web.post("/v1/reserve", json=body).content == first.content
        assert book.snapshot().jobs == {}
        page = web.get("/metrics").text
        assert 'baechi_requests_total{path="/v1/reserve",status="200"} 3.0' in page
        assert "baechi_ledger_version 2.0" in page


def test_a_ledger_that_is_held_by_another_is_no_fault_of_the_request(tmp_path, monkeypatch):
    monkeypatch.setattr("baechi.storage.sqlite_file.PATIENCE", 0.01)
    book = Ledger(GRID, tmp_path / "ledger.sqlite")
    with TestClient(create_app(book, workers=1)) as web:
        holder = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        claim = {"device": "node0/0", "memory_bytes": 1}
        body = {"schema": 1, "job": "a", "claims": [claim]}
        assert post(web, "/v1/reserve", body, 503)["error"] == "busy"
        holder.execute("COMMIT")
        holder.close()
        post(web, "/v1/reserve", body)
    book.close()


def test_a_token_is_wanted_of_everybody():
    with TestClient(create_app(Ledger(GRID), token="t" * 20, workers=1)) as web:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "t" * 20}):
            answer = web.get("/v1/snapshot", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"] == "unauthorized"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/v1/snapshot", "/metrics"):
            assert web.get(path).status_code == 401
            good = web.get(path, headers={"Authorization": f"Bearer {'t' * 20}"})
            assert good.status_code == 200
        assert web.get("/healthz").json() == {"status": "ok", "version": 0}
        assert web.get("/openapi.json").json()["paths"]["/v1/solve"]["post"]["security"]


def processes(before=()):
    """The processes that this one has started, but for some."""
    return set(multiprocessing.active_children()) - set(before)


def test_an_answer_that_takes_too_long_is_given_up_and_the_next_is_not():
    before = processes()
    with TestClient(create_app(Ledger(GRID), workers=1, limits=Limits(seconds=4))) as web:
        upload(web)
        (worker,) = processes(before)
        os.kill(worker.pid, signal.SIGSTOP)
        body = {"schema": 1, "graph": GRAPH.digest}
        answer = web.post("/v1/solve", json=body)
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "1"
        assert "took longer than 4 s" in answer.json()["message"]
        # Another process has taken its place.
        post(web, "/v1/solve", body)
        (other,) = processes(before)
        assert other.pid != worker.pid
        os.kill(other.pid, signal.SIGKILL)
        assert "ended the worker" in post(web, "/v1/solve", body, 503)["message"]


def test_who_asks_while_too_many_wait_is_told_to_come_back():
    before = processes()
    app = create_app(Ledger(GRID), workers=1, limits=Limits(waiting=0))
    with TestClient(app) as web, ThreadPoolExecutor(1) as pool:
        upload(web)
        (worker,) = processes(before)
        os.kill(worker.pid, signal.SIGSTOP)
        body = {"schema": 1, "graph": GRAPH.digest}
        first = pool.submit(web.post, "/v1/solve", json=body)
        with pytest.raises(TimeoutError):
            first.result(timeout=1)
        assert post(web, "/v1/solve", body, 503)["error"] == "busy"
        # What is no solve goes on meanwhile.
        claim = {"device": "node0/0", "memory_bytes": 1}
        post(web, "/v1/reserve", {"schema": 1, "job": "a", "claims": [claim]})
        os.kill(worker.pid, signal.SIGCONT)
        assert first.result().status_code == 200


class Server:
    """A real server process on a folder's ledger."""

    def __init__(self, folder, *words, cluster=GRID):
        self.folder = folder
        if not (folder / "top.json").exists():
            baechi.dump(cluster, folder / "top.json")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baechi", "serve", str(folder / "top.json"), "--ledger",
             str(folder / "ledger.sqlite"), "--port", "0", "--workers", "1", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        line = self.process.stdout.readline()
        match = re.fullmatch(r"serving on (http://127\.0\.0\.1:\d+)\n", line)
        assert match, line + self.process.stdout.read()
        self.url = match[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def stop(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        rest = self.process.stdout.read()
        return self.process.wait(60), rest


@pytest.mark.slow
def test_no_request_of_the_openapi_document_is_an_error_of_the_service(start):
    schemathesis = pytest.importorskip("schemathesis")
    import requests
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

    checks = [not_a_server_error, status_code_conformance, content_type_conformance]
    some = settings(
        max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    seen = Counter()
    server = start()

    session = requests.Session()

    def ask(case):
        answer = case.call(base_url=server.url, session=session)
        case.validate_response(answer, checks=checks)
        seen[case.operation.path] += 1

    raw = httpx.get(server.url + "/openapi.json").json()
    page = schemathesis.openapi.from_dict(raw)
    for result in page.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:
            if operation.body or mode is schemathesis.GenerationMode.POSITIVE:
                some(given(operation.as_strategy(generation_mode=mode))(ask))()
    # The same about a graph that the service knows.
    with Client(server.url) as client:
        digest = {"const": client.upload(GRAPH)}
    for name in ("SolveRequest", "WhatIfRequest"):
        raw["components"]["schemas"][f"{name}Message"]["properties"]["graph"] = digest
    page = schemathesis.openapi.from_dict(raw)
    for path in ("/v1/solve", "/v1/whatif"):
        some(given(page[path]["POST"].as_strategy())(ask))()
    session.close()
    assert server.stop() == (0, "stopped\n")
    assert set(seen) == {
        "/v1/graphs", "/v1/solve", "/v1/whatif", "/v1/reserve", "/v1/release", "/v1/snapshot",
        "/healthz", "/metrics",
    }  # fmt: skip
    assert min(seen[path] for path in seen if path.startswith("/v1/") and path[-1] != "t") > 20


def keep_on(url, granted):
    """Reserves one thing after the other until there is no answer any more."""
    with Client(url) as client, contextlib.suppress(ServiceError):
        for at in range(1000):
            made = client.reserve(f"b{at}", [Claim("node1/0", 1, 1)])
            granted.append(made)


def test_a_killed_server_that_is_restarted_has_what_it_granted(start):
    server = start()
    client = Client(server.url)
    answer = client.solve(GRAPH, Wish(share_milli=500))
    made = client.reserve("a", answer.claims, version=answer.version, request_id="r")
    granted = []

    thread = threading.Thread(target=keep_on, args=(server.url, granted))
    thread.start()
    while thread.is_alive() and len(granted) < 3:
        time.sleep(0.01)
    os.kill(server.process.pid, signal.SIGKILL)
    thread.join()
    server.process.wait()
    client.close()
    again = start()
    client = Client(again.url)
    now = client.snapshot()
    jobs = {row.job: row for row in now.jobs}
    assert {row.job: row for row in (made, *granted)}.items() <= jobs.items()
    assert len(jobs) - len(granted) in (1, 2)
    assert client.reserve("a", answer.claims, version=answer.version, request_id="r") == made
    for job in jobs:
        client.release(job)
    assert [row.device for row in client.snapshot().free] == list(GRID.devices)
    client.close()
    code, rest = again.stop()
    assert (code, rest.strip()) == (0, "stopped")


def test_of_requests_for_the_last_gigabyte_one_wins_and_a_graceful_stop_loses_nothing(
    start, tmp_path
):
    server = start()

    def ask(at):
        with Client(server.url) as client:
            try:
                return client.reserve(f"job{at}", [Claim("node0/1", "1GiB", 10)])
            except ReservationError as error:
                return error.reason

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert answers.count("capacity") == 7
    (winner,) = [row for row in answers if row != "capacity"]
    granted = []

    thread = threading.Thread(target=keep_on, args=(server.url, granted))
    thread.start()
    while thread.is_alive() and len(granted) < 3:
        time.sleep(0.01)
    code, rest = server.stop()
    thread.join()
    assert code == 0, rest
    book = Ledger(path=tmp_path / "ledger.sqlite")
    assert set(book.snapshot().jobs) == {winner.job, *(row.job for row in granted)}
    book.close()


def test_the_client_has_the_same_values_in_and_out(start, tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    server = start("--token-file", str(token))
    with pytest.raises(ServiceError) as refused, Client(server.url) as client:
        client.snapshot()
    assert refused.value.status == 401
    client = Client(server.url, token="0123456789abcdef0123")
    empty = Snapshot(Site.of(GRID))
    wish = Wish(same="switch", constraints=Constraints(max_devices=2))
    answer = client.solve(GRAPH, wish)
    assert answer.decision == decide(GRAPH, empty, wish)
    assert isinstance(answer.decision.placement, Placement)
    assert client.whatif(GRAPH, wish, up_to=2) == whatif(GRAPH, empty, wish, up_to=2)
    made = client.reserve("a", answer.claims, version=answer.version)
    assert made.job == "a"
    assert client.snapshot().jobs == (made,)
    assert client.whatif(GRAPH, after=["a"]).waiting[0].job == "a"
    with pytest.raises(ReservationError, match="reservation already"):
        client.reserve("a", answer.claims)
    with pytest.raises(InputError, match="gpu"):
        client.solve(GRAPH, Wish(constraints=Constraints(excluded=("gpu",))))
    with pytest.raises(ServiceError, match="no graph"):
        client.solve("0" * 64)
    client.close()
    assert client.release("a") == made
    assert httpx.get(server.url + "/docs").status_code == 200
    server.stop(signal.SIGINT)
    with pytest.raises(ServiceError, match="no answer"):
        client.snapshot()
    with pytest.raises(InputError):
        Client("ftp://here")


def serve(*words, code=2):
    result = CliRunner().invoke(command, ["serve", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_refuses_what_is_not_safe_or_not_there(tmp_path):
    top, token = tmp_path / "top.json", tmp_path / "token"
    baechi.dump(GRID, top)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        assert "give --token-file" in serve(top, "--host", host)
    token.write_text("short")
    assert "16 or more" in serve(top, "--host", "0.0.0.0", "--token-file", token)
    assert "cannot read a token" in serve(top, "--token-file", tmp_path / "absent")
    assert "no ledger" in serve("--ledger", tmp_path / "absent.sqlite")
    baechi.dump(GRAPH, tmp_path / "graph.json")
    assert "but Cluster or Topology is wanted" in serve(tmp_path / "graph.json")
    assert "cannot listen" in serve(top, "--host", "192.0.2.1", "--token-file", write(token))


def write(token):
    token.write_text("0123456789abcdef")
    return token


def test_messages_are_equal_bytes_and_come_back():
    decision = decide(GRAPH, Snapshot(Site.of(Cluster.uniform(3, 100, LINK))))
    body = encode(decision)
    assert decode(body, type(decision)) == decision
    assert encode(decode(body, type(decision))) == body


def test_a_ledger_that_is_damaged_is_no_fault_of_the_request(tmp_path):
    book = Ledger(GRID, tmp_path / "ledger.sqlite")
    with TestClient(create_app(book, workers=1)) as web:
        upload(web)
        body = {"schema": 1, "job": "a", "claims": [{"device": "node0/0", "memory_bytes": 1}]}
        post(web, "/v1/reserve", body)
        other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        other.execute("UPDATE jobs SET claims = 'x'")
        other.execute("UPDATE state SET version = 2")
        other.close()
        assert "damaged" in post(web, "/v1/reserve", {**body, "job": "b"}, 503)["message"]
        post(web, "/v1/solve", {"schema": 1, "graph": GRAPH.digest}, 503)
        for path in ("/v1/snapshot", "/healthz", "/metrics"):
            assert web.get(path).status_code == 503
    book.close()


def test_the_client_says_what_is_wrong_in_its_words():
    for url in ("http://here:99999", "http://here:x"):
        with pytest.raises(InputError, match="url is"):
            Client(url)
    with pytest.raises(ServiceError, match=r"no answer from http://\[::1\]:9"):
        Client("http://[::1]:9").snapshot()
    with pytest.raises(InputError, match="job is 5"):
        Client().release(5)
    # What answers is no service: it hangs up, and then talks nonsense.
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer():
            for text in (b"", b"nonsense\r\n\r\n"):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(text)

        done = pool.submit(answer)
        with pytest.raises(ServiceError, match="no answer"):
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}").snapshot()
        done.result()


def test_how_devices_are_shared_is_the_ledgers_matter_where_nothing_is_said(start, tmp_path):
    Ledger(GRID, tmp_path / "ledger.sqlite", sharing="whole").close()
    for cluster in ((), (tmp_path / "top.json",)):
        baechi.dump(GRID, tmp_path / "top.json")
        text = serve(*cluster, "--ledger", tmp_path / "ledger.sqlite", "--sharing", "mig")
        assert "shared in another way" in text
    server = start()
    with Client(server.url) as client:
        claims = [Claim("node0/0", 1, 1)]
        assert client.reserve("a", claims).claims == (Claim("node0/0", 2**30),)
