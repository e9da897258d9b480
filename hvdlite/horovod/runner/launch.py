"""`horovod.runner.launch`: where horovodrun was; there is nothing of it but words that say what to use."""

raise ModuleNotFoundError(
    "horovod.runner.launch: hvdlite has no horovodrun: use hvdlite-run --horovod, with its flags, or horovod.run()"
)
