//! Memory of the library's own, on the CPU and, where there is one, on a GPU.

use kivi::{Attend, Batch, Buffer, Cache, Config, Device, ErrorKind, Heads, Workspace, F16};

const HEADS: Heads = Heads { q_heads: 4, kv_heads: 2, key_dim: 64, value_dim: 64 };

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37).sin()).collect()
}

/// What a cache on the device answers: its output, the LSE and a blob.
fn run(device: Device) -> (Vec<f32>, Vec<f32>, Vec<u8>) {
    let config = Config::preset("k3v2").unwrap().device(device, 0).layer_count(1).heads(HEADS);
    let mut cache = Cache::new(&config.max_sequences(2).max_tokens(1024)).unwrap();
    let buffer = |count| Buffer::from_slice(device, 0, &numbers(count)).unwrap();
    let (k, v, q) = (buffer(2 * 300 * 2 * 64), buffer(2 * 300 * 2 * 64), buffer(2 * 4 * 64));
    let (mut out, mut lse, sinks) = (buffer(2 * 4 * 64), buffer(2 * 4), buffer(4));
    let shape = [2, 300, 2, 64];
    cache.append(0, &Batch::first(2, 300), &k.view(&shape).unwrap(), &v.view(&shape).unwrap()).unwrap();
    let mut workspace = cache.workspace(None, 2, 1).unwrap();
    let mut of_lse = lse.view_mut(&[2, 1, 4]).unwrap();
    let params = Attend::new().lse(&mut of_lse).learned_sinks_in(&sinks);
    let (queries, mut result) = (q.view(&[2, 1, 4, 64]).unwrap(), out.view_mut(&[2, 1, 4, 64]).unwrap());
    cache.attend(0, &Batch::first(2, 1), &queries, &mut result, params, &mut workspace).unwrap();
    (out.to_vec().unwrap(), lse.to_vec().unwrap(), cache.export_sequence(1).unwrap())
}

fn assert_kind<T>(outcome: kivi::Result<T>, kind: ErrorKind) {
    assert_eq!(outcome.err().map(|error| error.kind()), Some(kind));
}

#[test]
fn elements_come_back_and_views_fit() {
    let values: Vec<F16> = (0..48).map(F16).collect();
    let mut buffer = Buffer::from_slice(Device::Cpu, 0, &values).unwrap();
    assert_eq!((buffer.len(), buffer.is_empty()), (48, false));
    assert_eq!(buffer.to_vec().unwrap(), values);
    buffer.write(&values.iter().rev().copied().collect::<Vec<_>>()).unwrap();
    assert_eq!(buffer.to_vec().unwrap()[0], F16(47));
    assert_kind(buffer.write(&values[1..]), ErrorKind::InvalidArgument);
    assert_kind(buffer.view(&[2, 3, 4]), ErrorKind::InvalidArgument);
    assert_kind(buffer.view_mut(&[48, 2]), ErrorKind::InvalidArgument);
    assert!(Buffer::<f32>::from_slice(Device::Cpu, 0, &[]).unwrap().is_empty());
    assert_kind(Buffer::from_slice(Device::Cpu, 7, &values), ErrorKind::NoDevice);
    assert_kind(Workspace::with_bytes(Device::Cpu, 0, usize::MAX / 2), ErrorKind::OutOfMemory);
}

#[test]
fn one_program_on_every_device() {
    let (out, lse, blob) = run(Device::Cpu);
    if kivi::device_count(Device::Cuda).unwrap() == 0 {
        println!("SKIP: there is no GPU");
        return;
    }
    let (of_gpu, lse_of_gpu, blob_of_gpu) = run(Device::Cuda);
    assert_eq!(blob, blob_of_gpu);
    let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 5e-3 * (1.0 + b.abs()));
    assert!(near(&of_gpu, &out) && near(&lse_of_gpu, &lse));
}
