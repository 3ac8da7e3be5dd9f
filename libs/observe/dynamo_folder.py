"""Workers and record addresses from a Dynamo fleet's discovery folder (DYN_FILE_KV)."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.observe.dynamo import TOPIC, Card, Channel, parse_card, parse_channel
from libs.observe.fleet import MOST_SERVERS

MAX_FILE_BYTES: Final = 1024 * 1024
MOST_FILES: Final = 16 * MOST_SERVERS
# Dynamo touches its files every 3.3 s and removes those of others after 10 s. The files of the last process remain.
LEASE_S: Final = 20.0
_KEYS: Final = "v1"


@dataclass(frozen=True)
class DynamoMembers:
    cards: dict[str, Card]
    """The workers by the `worker_id` of their records."""
    channels: dict[int, Channel]
    """The channels of records by the `publisher_id` of their messages."""


def check_folder(folder: Path) -> None:
    """Raise InvalidRequest unless this is the discovery folder of a fleet that has started."""
    if (folder / _KEYS / "mdc").is_dir():
        return
    wrong = "has no v1/mdc" if folder.is_dir() else "is no folder"
    raise InvalidRequest(
        f"{str(folder)[:200]!r} {wrong}, so it is not the discovery folder of a Dynamo fleet: start the fleet with "
        "DYN_DISCOVERY_BACKEND=file, wait for its first worker, and give the folder of its DYN_FILE_KV"
    )


def read_members(folder: Path, now_s: float) -> DynamoMembers:
    """Return the members of the fleet whose files have been touched recently."""
    cards = (parse_card(text) for text in _texts(folder / _KEYS / "mdc", "", now_s))
    channels = (parse_channel(text) for text in _texts(folder / _KEYS / "event_channels", TOPIC, now_s))
    return DynamoMembers(
        {str(each.instance_id): each for each in cards if each is not None},
        {each.instance_id: each for each in channels if each is not None},
    )


def _texts(folder: Path, topic: str, now_s: float) -> Iterator[bytes]:
    """Yield the contents of the files for a topic, whose names are encoded like parts of a URL."""
    wanted = topic.replace("-", "%2D")
    with suppress(OSError):
        for count, file in enumerate(folder.iterdir()):
            if count >= MOST_FILES:
                return
            if wanted not in file.name:
                continue
            with suppress(OSError):
                if file.stat().st_mtime > now_s - LEASE_S:
                    with file.open("rb") as opened:
                        yield opened.read(MAX_FILE_BYTES)
