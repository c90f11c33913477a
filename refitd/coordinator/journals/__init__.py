"""Where decisions and what is live are kept: a sqlite file, or etcd, behind one interface."""
