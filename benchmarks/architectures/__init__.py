"""Every architecture of Transformers in tensor-train form, against its dense baseline."""
