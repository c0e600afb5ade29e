"""Column types of the tables: ids derived from a natural key, JSON, sorted keys."""

import functools
import json
import uuid
from typing import Any

from sqlalchemy import MetaData, Text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from gpuops.store.spool.format import canonical_json

_NAMESPACE = uuid.UUID("6f0d7a7e-5a52-5f0c-9d0e-3d1a3d6b3c11")


# Each event of a batch names the same few nodes, runs and attempts.
@functools.lru_cache(maxsize=4096)
def derived_id(noun: str, *natural_key: str | int) -> str:
    """Return the id of the row of *noun* with this natural key: the same on every store."""
    return str(uuid.uuid5(_NAMESPACE, canonical_json([noun, *natural_key])))


class JsonText(TypeDecorator[Any]):
    """JSON as canonical text: equal bytes on both databases (Postgres reads it by ``::jsonb``)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ANN401, ARG002
        return None if value is None else canonical_json(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ANN401, ARG002
        return None if value is None else json.loads(value)


# Keys are compared in SQL, by code point whatever the server's locale.
Key = Text().with_variant(Text(collation="C"), "postgresql")

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
