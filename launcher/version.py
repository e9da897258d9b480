"""The version of hvdlite: read by the packaging, and compared between hosts."""

VERSION = "0.1.0"
