"""The API of ``machin.parallel``, on rayrpc; import its modules: ``distributed``, ..."""
