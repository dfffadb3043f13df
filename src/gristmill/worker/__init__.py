"""The only row path: commit(predict(prepare(shard))), run inside a worker on every engine."""
