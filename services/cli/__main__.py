"""`python -m services.cli`."""

from services.cli.main import app

app(prog_name="meshnet")
