"""Sans-IO codecs of the frames that trainers and agents exchange. Standard library only.

Two protocols live here, and nothing else:

* :mod:`proxyd.wire.client`: trainer <-> its agent (Unix socket with passed memory, or TCP for gateway use);
* :mod:`proxyd.wire.peer`: agent <-> agent (one control connection and N data connections per direction).

Both are built from :mod:`proxyd.wire.codec`, share :mod:`proxyd.wire.envelope`, and authenticate by
:mod:`proxyd.wire.auth`. :mod:`proxyd.wire.arena` describes the shared memory that both sides map.
"""
