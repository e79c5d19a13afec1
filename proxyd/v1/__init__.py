"""GENERATED from protos/proxyd/v1 by tools/protos.py. Do not edit: run `make protos`."""
