"""The thread that sends batches to the metrics service. The engine never waits for it."""

import http.client
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from .recorder import StepRecorder
from .wire import Source, encode

log = logging.getLogger("vllm")

EVERY_S = 0.1
RETRY_S = 1.0
REFUSED_S = 5.0
TIMEOUT_S = 2.0
MAX_BATCHES = 600
"""The maximum number of batches that wait to be sent. The oldest ones beyond it are dropped and counted."""
MAX_SENT_AT_ONCE = 8
"""The maximum number of batches sent in one turn, so that an outage does not end in a burst."""
PATH = "/v1/observed/steps"
CONTENT_TYPE = "application/x-protobuf"
BUSY_STATUSES = (429, 503)
CONFLICT = 409


class Unreachable(Exception):
    """The service did not answer in time."""


class Post(Protocol):
    def __call__(self, body: bytes) -> tuple[int, str]:
        """Return the status and the beginning of the answer. Raise Unreachable."""
        ...


class HttpPost:
    """A `Post` over one persistent connection."""

    def __init__(self, url: str, token: str) -> None:
        """Create the client. Raise ValueError if `url` is not a valid URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address like http://host:8002")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=TIMEOUT_S)
        self._path = parts.path.rstrip("/") + PATH
        self._headers = {"content-type": CONTENT_TYPE} | ({"authorization": f"Bearer {token}"} if token else {})

    def __call__(self, body: bytes) -> tuple[int, str]:
        try:
            self._connection.request("POST", self._path, body, self._headers)
            answer = self._connection.getresponse()
            text = answer.read(4096)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Unreachable(str(error) or type(error).__name__) from None
        if not answer.isclosed():
            self._connection.close()
        return answer.status, text.decode(errors="replace")


class Reporter:
    """A reporter that cuts batches ten times a second and sends them in order."""

    def __init__(self, recorder: StepRecorder, source: Source, post: Post) -> None:
        self._recorder = recorder
        self._source = source
        self._post = post
        self._unsent: deque[bytes] = deque()
        self._stopping = threading.Event()
        self._trouble = ""
        self._unanswered = False
        """True if the oldest batch was sent without an answer. The service may have received it."""
        self.dropped = 0
        """The number of batches that never arrived, because too many waited or the service refused them."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="fulcrum observe", daemon=True).start()

    def stop(self) -> None:
        """Let the thread send a last batch if the process lives long enough, and return at once."""
        self._stopping.set()

    def _run(self) -> None:
        pause_s = EVERY_S
        while not self._stopping.wait(pause_s):
            pause_s = self._turn_safely(last=False)
        self._turn_safely(last=True)

    def _turn_safely(self, *, last: bool) -> float:
        try:
            return self.turn(last=last)
        except Exception as error:  # a thread that ends would silently stop the reports
            self._warn(f"{type(error).__name__}: {error}")
            return REFUSED_S

    def turn(self, *, last: bool = False) -> float:
        """Cut a batch, send waiting batches, and return the seconds until the next turn."""
        for batch in self._recorder.cut(self.dropped, last=last):
            self._unsent.append(encode(self._source, batch))
        while len(self._unsent) > MAX_BATCHES:
            self._unsent.popleft()
            self._unanswered = False
            self.dropped += 1
        for _ in range(MAX_SENT_AT_ONCE):
            if not self._unsent:
                break
            try:
                status, answer = self._post(self._unsent[0])
            except Unreachable as error:
                self._unanswered = True
                self._warn(str(error))
                return RETRY_S
            if status in BUSY_STATUSES:
                self._warn(f"{status}: {answer[:400]}")
                return RETRY_S
            self._unsent.popleft()
            unanswered, self._unanswered = self._unanswered, False
            if status == CONFLICT and unanswered:  # the first attempt had arrived
                continue
            if status >= 400:
                self.dropped += 1
                self._warn(f"{status}: {answer[:400]}")
                return REFUSED_S
        if self._trouble:
            log.info("fulcrum-observe: steps are reported again; %d batches were dropped so far", self.dropped)
            self._trouble = ""
        return EVERY_S

    def _warn(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("fulcrum-observe: steps are not reported (%s)", trouble)


def make_reporter(recorder: StepRecorder, source: Source, url: str, token: str) -> Callable[[], None]:
    """Start a reporter and return a function that stops it."""
    reporter = Reporter(recorder, source, HttpPost(url, token))
    reporter.start()
    return reporter.stop
