"""`horovod.runner.launch`, the module of horovodrun: importing it raises an error that names hvdlite-run."""

raise ModuleNotFoundError(
    "horovod.runner.launch: hvdlite has no horovodrun: use hvdlite-run --horovod, with its flags, or horovod.run()"
)
