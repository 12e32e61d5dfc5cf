"""kv_slots: put K and V rows into slots of the paged store, and move accepted rows to the front of a window.

slot = page * page_size + offset.

write(k [N, Hkv, D] float32, v [N, Hkv, D] float32, slots [N] int32, store_k [pages, Hkv, D, page_size],
      store_v [pages, Hkv, page_size, D]) -> None      one layer; values are rounded to the store's dtype
move(src [M] int32, dst [M] int32, store: KVTensors) -> None      all layers; as if every source was read before any write
"""
