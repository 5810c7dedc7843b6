"""Functions that ``test_process.py`` calls in processes of their own."""

import time


def tell(send, *values):
    """Send each value."""
    for value in values:
        send(value)


def tell_and_wait(send, value):
    """Send, then go past any limit of time."""
    send(value)
    time.sleep(60)


def fill_memory(send, gib):
    """Ask for so much memory at once."""
    send(len(bytearray(gib << 30)))


def end(send, status):
    """End the process without a word."""
    send("begun")
    raise SystemExit(status)
