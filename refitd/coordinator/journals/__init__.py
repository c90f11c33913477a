"""Journals of decisions and live versions: a sqlite file, or etcd, behind one interface."""
