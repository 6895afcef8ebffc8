//! A step through this crate allocates nothing: views, batches and parameters live on the stack.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use kivi::{Attend, Batch, Cache, TensorMut, TensorRef};
use support::*;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a counter of the thread beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn append_attend_and_step_allocate_nothing() {
    let mut cache = Cache::new(&config("k3v2", HEADS, 2, 600)).unwrap();
    let mut workspace = cache.workspace(None, 2, 1).unwrap();
    let mut random = Random::new(1);
    let (kv, q) = (random.normals(2 * 2 * 64), random.normals(2 * 6 * 64));
    let (mut out, mut lse) = (vec![0.0f32; 2 * 6 * 64], vec![0.0f32; 2 * 6]);
    let (sequences, counts, sinks) = ([1, 0], [1, 1], [0.5f32; 6]);
    let before = ALLOCATIONS.get();
    for _ in 0..300 {
        let batch = Batch::ragged(&sequences, &counts).unwrap();
        let kv = TensorRef::new(&kv, &[2, 1, 2, 64]).unwrap();
        cache.append(0, &batch, &kv, &kv).unwrap();
        let mut lse = TensorMut::with_strides(&mut lse, &[2, 1, 6], &[6, 6, 1]).unwrap();
        let params = Attend::new().learned_sinks(&sinks).lse(&mut lse);
        cache
            .attend(
                0,
                &batch,
                &TensorRef::with_strides(&q, &[2, 1, 6, 64], &[384, 384, 64, 1]).unwrap(),
                &mut TensorMut::new(&mut out, &[2, 1, 6, 64]).unwrap(),
                params,
                &mut workspace,
            )
            .unwrap();
        let q = TensorRef::new(&q, &[2, 1, 6, 64]).unwrap();
        let mut out = TensorMut::new(&mut out, &[2, 1, 6, 64]).unwrap();
        cache.step(0, &batch, &q, &kv, &kv, &mut out, Attend::new(), &mut workspace).unwrap();
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    drop(std::hint::black_box(vec![0u8; 100]));
    assert_eq!(ALLOCATIONS.get() - before, 1, "the counter counts");
    assert_eq!(cache.length(0, 0).unwrap().length, 600);
}
