//! Views: what they refuse, so that no safe call reads or writes outside of a slice. Needs no cache.

use kivi::{Bf16, ErrorKind, TensorMut, TensorRef, F16};

fn refused(view: kivi::Result<TensorRef<'_>>) -> String {
    let error = view.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    error.message().to_owned()
}

#[test]
fn dense_views_need_the_exact_length() {
    let data = [0.0f32; 24];
    assert_eq!(TensorRef::new(&data, &[2, 3, 4]).unwrap().shape(), [2, 3, 4]);
    assert_eq!(
        refused(TensorRef::new(&data, &[2, 3, 5])),
        "the slice has 24 elements, shape [2, 3, 5] has 30"
    );
    assert_eq!(
        refused(TensorRef::new(&data, &[2, 3, 3])),
        "the slice has 24 elements, shape [2, 3, 3] has 18"
    );
}

#[test]
fn ranks_are_2_to_4() {
    let data = [0.0f32; 8];
    for shape in [&[][..], &[8], &[1, 1, 1, 1, 8]] {
        assert!(refused(TensorRef::new(&data, shape)).contains("2, 3 or 4"));
    }
    assert!(refused(TensorRef::with_strides(&data, &[2, 4], &[4, 1, 1])).contains("3 strides for 2 sizes"));
}

#[test]
fn strided_views_stay_inside_their_slice() {
    let data = [0.0f32; 20];
    // Last element at 2 * 6 + 1 * 4 + 3 = 19.
    assert!(TensorRef::with_strides(&data, &[3, 2, 4], &[6, 4, 1]).is_ok());
    assert_eq!(
        refused(TensorRef::with_strides(&data[..19], &[3, 2, 4], &[6, 4, 1])),
        "the slice has 19 elements, shape [3, 2, 4] with strides [6, 4, 1] needs 20"
    );
    assert_eq!(
        refused(TensorRef::with_strides(&data, &[3, 2, 4], &[8, 4, 2])),
        "the innermost stride is 2, not 1"
    );
    // Where the innermost size is 1, its stride is free.
    assert!(TensorRef::with_strides(&data, &[3, 1], &[6, 9]).is_ok());
}

#[test]
fn sizes_that_overflow_are_refused() {
    let data = [0.0f32; 4];
    let huge = usize::MAX / 2;
    assert!(refused(TensorRef::new(&data, &[huge, 4, 4])).contains("64-bit"));
    assert!(refused(TensorRef::with_strides(&data, &[3, 4], &[usize::MAX, 1])).contains("64-bit"));
    assert!(refused(TensorRef::with_strides(&data, &[3, 4], &[huge, 1])).contains("64-bit"));
    assert!(refused(TensorRef::with_strides(&data, &[huge, 4], &[1 << 62, 1])).contains("64-bit"));
    let mut data = [0.0f32; 4];
    assert!(TensorMut::with_strides(&mut data, &[huge, 4], &[huge, 1]).is_err());
}

#[test]
fn views_without_elements_need_no_memory() {
    let none: [f32; 0] = [];
    assert!(TensorRef::new(&none, &[0, 3, 4]).is_ok());
    assert!(TensorRef::with_strides(&none, &[5, 0, 4], &[400, 40, 1]).is_ok());
    assert!(TensorRef::new(&none, &[1, 1]).is_err());
}

#[test]
fn inputs_may_repeat_and_outputs_may_not() {
    let mut data = [0.0f32; 12];
    assert!(TensorRef::with_strides(&data, &[5, 3, 4], &[0, 4, 1]).is_ok());
    let overlaps = |data: &mut [f32], shape: &[usize], strides: &[usize]| match TensorMut::with_strides(
        data, shape, strides,
    ) {
        Ok(_) => false,
        Err(error) => {
            assert!(error.message().contains("overlaps itself"), "{error}");
            true
        }
    };
    assert!(overlaps(&mut data, &[5, 3, 4], &[0, 4, 1]));
    assert!(overlaps(&mut data, &[3, 4], &[3, 1]));
    assert!(overlaps(&mut data, &[2, 2, 4], &[4, 2, 1]));
    assert!(!overlaps(&mut data, &[3, 4], &[4, 1]));
    assert!(!overlaps(&mut data, &[2, 3, 2], &[2, 4, 1]), "heads outside of tokens");
    assert!(!overlaps(&mut data, &[1, 3, 4], &[0, 4, 1]), "a size of 1 takes no step");
}

#[test]
fn sixteen_bit_slices_are_the_same_memory() {
    let mut bits = [0x3c00u16, 0x4000];
    assert_eq!(F16::slice(&bits), [F16(0x3c00), F16(0x4000)]);
    Bf16::slice_mut(&mut bits)[1] = Bf16(7);
    assert_eq!(bits, [0x3c00, 7]);
    assert!(TensorRef::new(F16::slice(&bits), &[1, 2]).is_ok());
}
