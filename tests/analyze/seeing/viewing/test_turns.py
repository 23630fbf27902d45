"""Replays and who shows what they gather take turns."""

from __future__ import annotations

import threading

from analyze.seeing.view import Turns


def test_a_reader_sees_whole_messages_and_is_not_kept_waiting() -> None:
    """Two replays that never rest write pairs; a reader gets in between them, and finds each pair equal."""
    turns, pairs, over = Turns(), [[0, 0], [0, 0]], threading.Event()

    def write(pair: list[int]) -> None:
        while not over.is_set():
            with turns:
                pair[0] += 1
                pair[1] += 1

    threads = [threading.Thread(target=write, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    seen = []
    for _ in range(200):
        with turns.reading():
            assert all(first == second for first, second in pairs)
            seen.append(tuple(first for first, _ in pairs))
    over.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert all(list(numbers) == sorted(numbers) for numbers in zip(*seen, strict=True))
