"""Where things are by default, in the image; no imports, as root's first step needs two of them."""

PGDATA = "/opt/hindsight/pgdata"
RUN_DIR = "/run/hindsight"
API_VENV = "/opt/hindsight-api"
MODEL_DIR = "/opt/models/bge-small-en-v1.5"
POSTGRES_SOCKET = ".s.PGSQL.5432"  # PostgreSQL's own name for it
