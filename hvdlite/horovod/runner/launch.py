"""`horovod.runner.launch`: horovodrun's module; all that it does here is to say what to use instead."""

raise ModuleNotFoundError(
    "horovod.runner.launch: hvdlite has no horovodrun: use hvdlite-run --horovod, with its flags, or horovod.run()"
)
