"""Run by Alembic, on the connection that `gpuops.store.migrate` hands over."""

from alembic import context

from gpuops.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite alters tables by copying them, and its transactions (begun by hand) hold DDL too.
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
