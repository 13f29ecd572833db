"""A web server that answers the same file in several ways: what its sizes say, and what they do not."""

import socket
import threading
import urllib.request
from contextlib import contextmanager

import pytest

from data.errors import ReadError, ShardError
from data.storage.url import Url
from data.storage.web_bytes import WebBytes

CONTENT = bytes(range(250)) * 8


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@contextmanager
def answering(*answers):
    """A server that gives these answers, one per connection, and the last one again and again: (status, headers, what
    follows them)."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        for number in range(100):
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            status, headers, body = answers[min(number, len(answers) - 1)]
            with connection:
                connection.recv(65536)
                lines = [f"HTTP/1.1 {status} OK", 'ETag: "one"', "Connection: close", *headers, "", ""]
                connection.sendall("\r\n".join(lines).encode() + body)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Url.parse(f"http://127.0.0.1:{listener.getsockname()[1]}/a.tar")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


CHUNKED_CUT = (200, ["Transfer-Encoding: chunked"], b"3e8\r\n" + CONTENT[:1000] + b"\r\n")
CHUNKED_REST = b"3e8\r\n" + CONTENT[1000:] + b"\r\n0\r\n\r\n"


def test_an_answer_without_a_length_goes_on_with_one_that_has_it():
    rest = (206, ["Content-Length: 1000", "Content-Range: bytes 1000-1999/2000"], CONTENT[1000:])
    with answering(CHUNKED_CUT, rest) as url, WebBytes(url, 2) as raw:
        assert raw.read(1000) + raw.readall() == CONTENT


def test_an_answer_with_a_length_goes_on_with_one_that_has_none():
    begin = (200, ["Content-Length: 2000"], CONTENT[:1000])
    for place in ("bytes 1000-1999/2000", "bytes 1000-1999/*"):
        rest = (206, ["Transfer-Encoding: chunked", f"Content-Range: {place}"], CHUNKED_REST)
        with answering(begin, rest) as url, WebBytes(url, 2) as raw:
            assert raw.readall() == CONTENT


def test_another_size_is_another_file_whatever_says_it():
    begin = (200, ["Content-Length: 2000"], CONTENT[:1000])
    for headers in (["Content-Length: 1000", "Content-Range: bytes 1000-1999/2001"], ["Content-Length: 1001"]):
        status = 206 if len(headers) > 1 else 200
        with (
            answering(begin, (status, headers, CONTENT[1000:])) as url,
            WebBytes(url, 2) as raw,
            pytest.raises(ShardError, match="the file changed while it was read"),
        ):
            raw.readall()


def test_a_size_is_remembered_over_an_answer_without_one():
    begin = (200, ["Content-Length: 2000"], CONTENT[:1000])
    rest = (206, ["Transfer-Encoding: chunked", "Content-Range: bytes 1000-1999/*"], b"0\r\n\r\n")
    with answering(begin, rest) as url, WebBytes(url, 2) as raw, pytest.raises(ReadError, match="1000 of 2000 bytes"):
        raw.readall()


def test_a_length_that_is_no_number_is_asked_for_again():
    wrong, right = (200, ["Content-Length: abc"], CONTENT), (200, ["Content-Length: 2000"], CONTENT)
    with answering(wrong, right) as url, WebBytes(url, 2) as raw:
        assert raw.readall() == CONTENT
    with answering(wrong) as url, WebBytes(url, 2) as raw, pytest.raises(ReadError, match="Content-Length: 'abc'"):
        raw.readall()


def test_an_answer_that_is_refused_is_closed(monkeypatch):
    answers, opened = [], urllib.request.urlopen

    def urlopen(*given, **more):
        answers.append(opened(*given, **more))
        return answers[-1]

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    begin = (200, ["Content-Length: 2000"], CONTENT[:1000])
    elsewhere = (206, ["Content-Length: 1000", "Content-Range: bytes 0-999/2000"], CONTENT[1000:])
    other = (203, ["Content-Length: 3000"], CONTENT)
    with answering(begin, elsewhere, other) as url, WebBytes(url, 2) as raw:
        assert raw.read(1000) == CONTENT[:1000]
        with pytest.raises(ShardError, match="changed"):
            raw.read(10)
        assert [(answer.status, answer.closed) for answer in answers] == [(200, True), (206, True), (203, True)]
