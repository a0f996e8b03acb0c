"""hindsight-sidecar: PostgreSQL, pgvector and hindsight-api as one supervised process."""

__version__ = "0.1.0"
