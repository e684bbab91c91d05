"""Tables of the data buffer, and the audit of what they hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

#: PRAGMA user_version of a buffer.
VERSION = 1

#: Token ids are int32, logprobs float32, little-endian.
SCHEMA = (
    """
    CREATE TABLE weights (
        version INTEGER PRIMARY KEY,
        step    INTEGER NOT NULL,
        digest  TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE steps (
        step            INTEGER PRIMARY KEY CHECK (step > 0),
        state           TEXT NOT NULL
            CHECK (state IN ('planned', 'rolled_out', 'rewarded', 'scored', 'updated', 'synced')),
        samples         INTEGER NOT NULL CHECK (samples > 0),
        rollout_version INTEGER NOT NULL REFERENCES weights (version),
        train_version   INTEGER REFERENCES weights (version)
    )
    """,
    """
    CREATE TABLE samples (
        id                 TEXT PRIMARY KEY,
        step               INTEGER NOT NULL REFERENCES steps (step),
        prompt_index       INTEGER NOT NULL CHECK (prompt_index >= 0),
        group_index        INTEGER NOT NULL CHECK (group_index >= 0),
        state              TEXT NOT NULL
            CHECK (state IN ('planned', 'generated', 'rewarded', 'scored', 'consumed', 'aborted')),
        weight_version     INTEGER REFERENCES weights (version),
        prompt_token_ids   BLOB NOT NULL,
        response_token_ids BLOB,
        rollout_logprobs   BLOB CHECK (length(rollout_logprobs) = length(response_token_ids)),
        train_logprobs     BLOB CHECK (length(train_logprobs) = length(response_token_ids)),
        reward             REAL,
        advantage          REAL,
        finish_reason      TEXT,
        seed               INTEGER NOT NULL,
        UNIQUE (step, prompt_index, group_index),
        CHECK (state IN ('planned', 'aborted') OR
               (COALESCE(length(response_token_ids), 0) > 0
                AND rollout_logprobs IS NOT NULL AND weight_version IS NOT NULL)),
        CHECK (state IN ('planned', 'generated', 'aborted') OR reward IS NOT NULL),
        CHECK (state NOT IN ('scored', 'consumed') OR (train_logprobs IS NOT NULL AND advantage IS NOT NULL))
    )
    """,
    f"PRAGMA user_version = {VERSION}",
)

#: Each finds rows that must not be there; its columns fill the sentence.
_AUDIT = (
    (
        "step {} holds {} samples, {} were planned: a sample is lost, or one too many",
        """SELECT steps.step, COUNT(id), steps.samples FROM steps LEFT JOIN samples USING (step)
           GROUP BY steps.step HAVING COUNT(id) != steps.samples""",
    ),
    (
        "step {} has no prompt {} group {}: that sample is lost",
        """SELECT s.step, p.prompt_index, g.group_index FROM steps s
           JOIN (SELECT DISTINCT step, prompt_index FROM samples) p ON p.step = s.step
           JOIN (SELECT DISTINCT step, group_index FROM samples) g ON g.step = s.step
           LEFT JOIN samples x ON x.step = s.step AND x.prompt_index = p.prompt_index AND x.group_index = g.group_index
           WHERE x.id IS NULL""",
    ),
    (
        "sample {} does not bear the name of its step {}, prompt {} and group {}",
        """SELECT id, step, prompt_index, group_index FROM samples
           WHERE id != printf('s%06d-p%02d-g%d', step, prompt_index, group_index)""",
    ),
    (
        "sample {} is of weight version {}, its step {} of {}",
        """SELECT id, weight_version, step, rollout_version FROM samples JOIN steps USING (step)
           WHERE weight_version IS NOT NULL AND weight_version != rollout_version""",
    ),
    (
        "sample {} is {}, its step {} is {}: it was used twice, or left over",
        """SELECT id, samples.state, step, steps.state FROM samples JOIN steps USING (step)
           WHERE samples.state != 'aborted' AND
                 (samples.state = 'consumed') != (steps.state IN ('updated', 'synced'))""",
    ),
    (
        "step {} is {} without a sample in it",
        """SELECT step, state FROM steps WHERE state IN ('updated', 'synced') AND NOT EXISTS
           (SELECT 1 FROM samples WHERE samples.step = steps.step AND samples.state = 'consumed')""",
    ),
    (
        "sample {} is {}, its step {} is {}: the step is ahead of it",
        """SELECT id, samples.state, step, steps.state FROM samples JOIN steps USING (step)
           WHERE (samples.state = 'planned' AND steps.state != 'planned')
              OR (samples.state = 'generated' AND steps.state IN ('rewarded', 'scored'))
              OR (samples.state = 'rewarded' AND steps.state = 'scored')""",
    ),
    (
        "step {} is {} without the version that scored it",
        "SELECT step, state FROM steps WHERE state IN ('scored', 'updated', 'synced') AND train_version IS NULL",
    ),
    (
        "step {} is there, step {} before it is not",
        """SELECT step, step - 1 FROM steps s WHERE step > 1 AND NOT EXISTS
           (SELECT 1 FROM steps WHERE step = s.step - 1)""",
    ),
    (
        "step {} is synced without the weights that it made",
        """SELECT step FROM steps WHERE state = 'synced' AND NOT EXISTS
           (SELECT 1 FROM weights WHERE weights.step = steps.step)""",
    ),
)


def audit(connection: sqlite3.Connection) -> Iterator[str]:
    """Everything that is wrong, in words; reads the file, changes nothing."""
    for (found,) in connection.execute("PRAGMA integrity_check"):
        if found != "ok":
            yield f"damaged: {found}"
            return
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"table {table}, row {row}: its row of table {parent} is missing"
    for sentence, query in _AUDIT:
        for row in connection.execute(query):
            yield sentence.format(*row)
