"""All entries of the zoo."""

from zoo import conditioned, samplers, text_to_image, video
from zoo.base import Entry

MODULES = (text_to_image, conditioned, video, samplers)
ENTRIES: list[Entry] = [entry for module in MODULES for entry in module.ENTRIES]


def name_of(entry: Entry) -> str:
    """Of a test, and of no other entry."""
    return f"{entry.name}-{entry.task}".replace(" ", "-")


BY_NAME = {name_of(entry): entry for entry in ENTRIES}
