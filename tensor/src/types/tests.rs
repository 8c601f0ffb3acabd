//! Tests of tensors against a model that computes every index itself.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use bytes::Bytes;
use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::error::{TensorError, TensorErrorKind};
use crate::wire::tensor_metadata::{WireLayout, WireMetadata, WireShape};
use tonic_rdma_verbs::memory::Pool;

fn spec(dtype: Dtype, dims: &[u64]) -> TensorSpec {
    TensorSpec::new(dtype, Shape::new(dims).unwrap()).unwrap()
}

/// Returns a tensor with the elements 0, 1, 2 and so on.
fn counting(dims: &[u64]) -> Tensor {
    let mut tensor = TensorMut::zeroed(spec(Dtype::U32, dims)).unwrap();
    for (place, element) in tensor.as_mut_slice::<u32>().unwrap().iter_mut().enumerate() {
        *element = place as u32;
    }
    tensor.freeze()
}

/// A model of a tensor: its lengths, and the element at each index.
struct Model {
    dims: Vec<u64>,
    at: ElementAt,
}

/// A function that returns the element at an index.
type ElementAt = Box<dyn Fn(&[u64]) -> u64>;

impl Model {
    fn counting(dims: Vec<u64>) -> Self {
        let lengths = dims.clone();
        let at = move |index: &[u64]| index.iter().zip(&lengths).fold(0, |sum, (i, length)| sum * length + i);
        Self { dims, at: Box::new(at) }
    }

    fn slice(self, start: u64, end: u64) -> Self {
        let Self { mut dims, at } = self;
        dims[0] = end - start;
        let shifted = move |index: &[u64]| {
            let mut index = index.to_vec();
            index[0] += start;
            at(&index)
        };
        Self { dims, at: Box::new(shifted) }
    }

    fn permute(self, axes: Vec<usize>) -> Self {
        let Self { dims, at } = self;
        let permuted = axes.iter().map(|&axis| dims[axis]).collect();
        let back = move |index: &[u64]| {
            let mut original = vec![0; axes.len()];
            for (place, &axis) in axes.iter().enumerate() {
                original[axis] = index[place];
            }
            at(&original)
        };
        Self { dims: permuted, at: Box::new(back) }
    }

    fn elements(&self) -> Vec<u32> {
        let total: u64 = self.dims.iter().product();
        let elements = (0..total).map(|number| {
            let (mut index, mut rest) = (vec![0; self.dims.len()], number);
            for (place, length) in self.dims.iter().enumerate().rev() {
                index[place] = rest % length;
                rest /= length;
            }
            (self.at)(&index) as u32
        });
        elements.collect()
    }
}

/// An operation that makes a view.
#[derive(Clone, Debug)]
enum View {
    Slice(Index, Index),
    Permute(Vec<u32>),
    Transpose,
}

fn views() -> impl Strategy<Value = Vec<View>> {
    let view = prop_oneof![
        any::<(Index, Index)>().prop_map(|(start, end)| View::Slice(start, end)),
        prop::collection::vec(any::<u32>(), 5).prop_map(View::Permute),
        Just(View::Transpose),
    ];
    prop::collection::vec(view, 0..5)
}

/// Returns the tensor and the model after `views`.
fn apply(dims: &[u64], views: Vec<View>) -> (Tensor, Model) {
    let (mut tensor, mut model) = (counting(dims), Model::counting(dims.to_vec()));
    let rank = dims.len();
    for view in views {
        match view {
            View::Slice(a, b) if rank > 0 => {
                let rows = model.dims[0] as usize + 1;
                let (a, b) = (a.index(rows) as u64, b.index(rows) as u64);
                tensor = tensor.slice(a.min(b)..a.max(b)).unwrap();
                model = model.slice(a.min(b), a.max(b));
            }
            View::Slice(..) => {}
            View::Permute(keys) => {
                let mut axes: Vec<usize> = (0..rank).collect();
                axes.sort_by_key(|&axis| keys[axis]);
                tensor = tensor.permute(&axes).unwrap();
                model = model.permute(axes);
            }
            View::Transpose => {
                tensor = tensor.transpose();
                model = model.permute((0..rank).rev().collect());
            }
        }
    }
    (tensor, model)
}

proptest! {
    #[test]
    fn views_have_the_elements_of_the_model(dims in prop::collection::vec(0..5_u64, 0..5), views in views()) {
        let (tensor, model) = apply(&dims, views);
        let elements = model.elements();
        prop_assert_eq!(tensor.shape().dims(), &model.dims);
        let packed = tensor.to_contiguous().unwrap();
        prop_assert_eq!(packed.as_slice::<u32>().unwrap(), &elements);
        prop_assert!(packed.is_contiguous());
        match tensor.as_slice::<u32>() {
            Ok(slice) => prop_assert_eq!(slice, &elements),
            Err(error) => prop_assert_eq!(error, ValueError::NotContiguous(Box::new(*tensor.spec())).into()),
        }
        let mut filled = vec![0xff; elements.len() * 4];
        tensor.copy_to(&mut filled).unwrap();
        prop_assert_eq!(filled, packed.bytes().unwrap());
        prop_assert!(tensor.copy_to(&mut vec![0; elements.len() * 4 + 1]).is_err());
    }

    #[test]
    fn serialized_tensors_arrive(dims in prop::collection::vec(0..5_u64, 0..5), views in views(), shift in 0..4_usize) {
        let (tensor, model) = apply(&dims, views);
        let (metadata, bytes) = tensor.serialize().unwrap();
        prop_assert_eq!(metadata.bytes(), bytes.len() as u64);
        // A peer gets the metadata from the wire, and the bytes at any address.
        let metadata = Metadata::try_from(WireMetadata::decode(&WireMetadata::from(metadata).encode()).unwrap()).unwrap();
        let arrived = Bytes::from([&vec![0; shift][..], &bytes].concat()).slice(shift..);
        let arrived = Tensor::deserialize(&metadata, arrived).unwrap();
        prop_assert_eq!(arrived.spec(), tensor.spec());
        prop_assert_eq!(arrived.as_slice::<u32>().unwrap(), &model.elements());
    }

    #[test]
    fn strings_arrive(dims in prop::collection::vec(0..4_u64, 0..4), seed in any::<u8>(), transposed: bool) {
        let shape = Shape::new(&dims).unwrap();
        let strings: Vec<Vec<u8>> = (0..shape.elements()).map(|at| vec![at as u8; usize::from(seed.wrapping_mul(at as u8 | 1) % 7)]).collect();
        let mut tensor = Tensor::from_strings(shape, strings).unwrap();
        if transposed {
            tensor = tensor.transpose();
        }
        let (metadata, bytes) = tensor.serialize().unwrap();
        prop_assert_eq!(metadata.layout, MetadataLayout::Serialized { length: bytes.len() as u64 });
        let metadata = Metadata::try_from(WireMetadata::from(metadata)).unwrap();
        let arrived = Tensor::deserialize(&metadata, bytes).unwrap();
        prop_assert!(arrived.strings().unwrap().eq(tensor.strings().unwrap()));
        prop_assert!(arrived.strings().unwrap().eq(tensor.to_contiguous().unwrap().strings().unwrap()));
    }

    /// Checks that a peer's metadata is an error, or converts back to equal metadata.
    #[test]
    fn hostile_metadata_is_an_error_or_valid(
        dtype in prop_oneof![0..20_u16, any::<u16>()],
        dense: bool,
        dims in prop::collection::vec(prop_oneof![0..9_u64, any::<u64>()], 0..=16),
        bytes in prop_oneof![0..600_u64, any::<u64>()],
    ) {
        let layout = if dense { WireLayout::Dense } else { WireLayout::Serialized };
        let wire = WireMetadata { dtype, layout, shape: WireShape::new(&dims).unwrap(), bytes };
        if let Ok(metadata) = Metadata::try_from(wire) {
            prop_assert_eq!(WireMetadata::from(metadata), wire);
            prop_assert!(metadata.bytes() <= isize::MAX as u64);
        }
    }

    #[test]
    fn hostile_strings_are_an_error_or_a_tensor(
        elements in 0..6_u64,
        lengths in prop::collection::vec(prop_oneof![0..5_u64, any::<u64>()], 0..6),
        tail in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let mut bytes: Vec<u8> = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
        bytes.extend(tail);
        let layout = MetadataLayout::Serialized { length: bytes.len() as u64 };
        let metadata = Metadata { spec: spec(Dtype::String, &[elements]), layout };
        if let Ok(tensor) = Tensor::deserialize(&metadata, bytes.clone().into()) {
            prop_assert_eq!(tensor.serialize().unwrap().1, bytes);
        }
    }
}

#[test]
fn impossible_lengths_are_errors_before_an_allocation() {
    for (dims, bytes) in [(&[1 << 60][..], 16), (&[1 << 40, 1 << 20], 1 << 62), (&[0, 5], 8), (&[2], 15)] {
        let wire = WireMetadata {
            dtype: Dtype::String.code(),
            layout: WireLayout::Serialized,
            shape: WireShape::new(dims).unwrap(),
            bytes,
        };
        let error = Metadata::try_from(wire).unwrap_err();
        assert!(error.reason().contains(" does not have "), "{dims:?}: {error}");
        let metadata =
            Metadata { spec: spec(Dtype::String, dims), layout: MetadataLayout::Serialized { length: 16 } };
        assert!(Tensor::deserialize(&metadata, Bytes::from(vec![0xff; 16])).is_err(), "{dims:?}");
    }
    assert!(TensorMut::zeroed(spec(Dtype::U8, &[1 << 62])).is_err(), "no memory, and no abort");
}

#[test]
fn contradictory_metadata_is_an_error() {
    let wire = |dtype: Dtype, layout, bytes| {
        let shape = WireShape::new(&[2, 3]).unwrap();
        Metadata::try_from(WireMetadata { dtype: dtype.code(), layout, shape, bytes })
    };
    assert!(wire(Dtype::F32, WireLayout::Dense, 24).is_ok());
    assert_eq!(
        wire(Dtype::F32, WireLayout::Dense, 25).unwrap_err().to_string(),
        "the dense form of float32[2, 3] does not have 25 bytes"
    );
    assert!(wire(Dtype::F32, WireLayout::Serialized, 20).is_err());
    assert!(wire(Dtype::String, WireLayout::Dense, 48).is_err());
    assert!(wire(Dtype::String, WireLayout::Serialized, 47).is_err());
    assert!(wire(Dtype::String, WireLayout::Serialized, 48).is_ok());
}

#[test]
fn every_element_type_survives_a_round_trip() {
    fn round_trip<T: Element + PartialEq + std::fmt::Debug>(values: [T; 2]) {
        let mut tensor = TensorMut::zeroed(spec(T::DTYPE, &[2])).unwrap();
        tensor.as_mut_slice::<T>().unwrap().copy_from_slice(&values);
        assert_eq!(tensor.as_slice::<T>().unwrap(), values);
        assert_eq!(tensor.freeze().as_slice::<T>().unwrap(), values, "{}", T::DTYPE);
    }
    round_trip([f16::from_f32(1.5), f16::from_f32(-2.0)]);
    round_trip([bf16::from_f32(1.5), bf16::from_f32(-2.0)]);
    round_trip([1.5_f32, -2.0]);
    round_trip([1.5_f64, -2.0]);
    round_trip([1_i8, -2]);
    round_trip([1_i16, -2]);
    round_trip([1_i32, -2]);
    round_trip([1_i64, -2]);
    round_trip([1_u8, 2]);
    round_trip([1_u16, 2]);
    round_trip([1_u32, 2]);
    round_trip([1_u64, 2]);
    round_trip([true, false]);
    round_trip([[1.0_f32, 2.0], [3.0, 4.0]]);
    round_trip([[1.0_f64, 2.0], [3.0, 4.0]]);
}

#[test]
fn a_bool_of_two_is_an_error() {
    let tensor = Tensor::from_bytes(spec(Dtype::Bool, &[4]), Bytes::from_static(&[1, 0, 2, 1])).unwrap();
    let expected: TensorError = ValueError::Value { dtype: Dtype::Bool, index: 2 }.into();
    assert_eq!(tensor.as_slice::<bool>(), Err(expected.clone()));
    assert_eq!(tensor.slice(0..2).unwrap().as_slice::<bool>(), Ok(&[true, false][..]));
    let mut tensor = TensorMut::zeroed(spec(Dtype::Bool, &[3])).unwrap();
    tensor.bytes_mut().copy_from_slice(&[0, 1, 2]);
    assert_eq!(tensor.as_mut_slice::<bool>(), Err(expected));
}

#[test]
fn errors_name_what_does_not_fit() {
    let f32s = spec(Dtype::F32, &[2]);
    let aligned = TensorMut::zeroed(spec(Dtype::U8, &[12])).unwrap().freeze().to_bytes().unwrap();
    let error = Tensor::from_bytes(f32s, aligned.slice(..7)).unwrap_err();
    assert_eq!(error.to_string(), "float32[2] has 8 bytes, not 7");
    let error = Tensor::from_bytes(f32s, aligned.slice(1..9)).unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::Layout, "{error}");
    assert!(Tensor::copy_from(f32s, &aligned[1..9]).is_ok());
    let tensor = Tensor::from_bytes(f32s, aligned.slice(..8)).unwrap();
    assert_eq!(
        tensor.as_slice::<i32>().unwrap_err().to_string(),
        "the elements of the tensor are float32, not int32"
    );
    assert!(Tensor::from_bytes(spec(Dtype::String, &[8]), aligned.clone()).is_err());
    assert!(tensor.strings().is_err());
    let strings = Tensor::from_strings(Shape::new(&[1]).unwrap(), ["a"]).unwrap();
    assert_eq!(strings.bytes(), Err(ValueError::Variable(Dtype::String).into()));
    assert_eq!(
        strings.as_slice::<u8>().unwrap_err().to_string(),
        "the elements of the tensor are string, not uint8"
    );
    assert!(Tensor::from_strings(Shape::new(&[2]).unwrap(), ["a"]).is_err());
    for (start, end) in [(0, 3), (2, 1), (u64::MAX, u64::MAX)] {
        assert!(tensor.slice(start..end).unwrap_err().reason().contains(" has no rows "));
    }
    assert!(counting(&[]).slice(0..0).is_err(), "a scalar has no rows");
    for axes in [&[][..], &[0], &[0, 0], &[0, 2], &[0, 1, 2]] {
        let error = counting(&[2, 3]).permute(axes).unwrap_err();
        assert!(error.reason().contains("do not name each dimension"), "{axes:?}: {error}");
    }
}

#[test]
fn strides_that_lead_out_of_the_memory_are_errors() {
    let bytes = counting(&[6]).to_bytes().unwrap();
    let strided = |dims: &[u64], steps: &[u64]| {
        Tensor::from_strided(spec(Dtype::U32, dims), Strides::new(steps).unwrap(), bytes.clone())
    };
    let even = strided(&[3], &[2]).unwrap().to_contiguous().unwrap();
    assert_eq!(even.as_slice::<u32>().unwrap(), [0, 2, 4]);
    let repeated = strided(&[2, 3], &[1, 0]).unwrap().to_contiguous().unwrap();
    assert_eq!(repeated.as_slice::<u32>().unwrap(), [0, 0, 0, 1, 1, 1]);
    for (dims, steps) in [
        (&[4][..], &[2][..]),
        (&[7], &[1]),
        (&[2], &[u64::MAX]),
        (&[3, 3], &[2, 1]),
        (&[3], &[1, 1]),
        (&[2, 2], &[1]),
    ] {
        let error = strided(dims, steps).unwrap_err();
        assert!(error.reason().contains("does not fit into memory"), "{dims:?} {steps:?}: {error}");
    }
}

#[test]
fn a_tensor_of_a_pool_is_sent_from_where_it_is() {
    let pool = Pool::for_sending(1 << 20);
    let mut tensor = TensorMut::in_pool(spec(Dtype::U32, &[4, 8]), &pool).unwrap();
    tensor.as_mut_slice::<u32>().unwrap().fill(9);
    let tensor = tensor.freeze();
    let rows = tensor.slice(1..3).unwrap();
    let (lease, range) = rows.registered().unwrap();
    assert_eq!((lease[range.clone()].as_ptr(), range), (rows.bytes().unwrap().as_ptr(), 32..96));
    let again = Tensor::from_bytes(*rows.spec(), rows.to_bytes().unwrap()).unwrap();
    let (lease, range) = again.registered().unwrap();
    assert_eq!((lease.as_ptr(), range), (rows.bytes().unwrap().as_ptr(), 0..64), "found by its address");
    assert!(tensor.transpose().registered().is_none(), "not in the order in which it is sent");
    assert!(counting(&[4]).registered().is_none());
    let full = TensorMut::in_pool(spec(Dtype::U8, &[2 << 20]), &pool).err().unwrap();
    assert_eq!(full.kind(), TensorErrorKind::NoMemory, "{full}");
}

#[test]
fn the_last_reference_to_the_whole_memory_is_writable_again() {
    let pool = Pool::for_sending(1 << 20);
    let pooled = TensorMut::in_pool(spec(Dtype::U32, &[6]), &pool).unwrap().freeze();
    for tensor in [pooled, counting(&[6])] {
        let clone = tensor.clone();
        let tensor = tensor.try_into_mut().expect_err("there is another");
        drop(clone);
        let part = tensor.slice(0..5).unwrap();
        drop(tensor);
        assert!(part.try_into_mut().is_err(), "a part");
    }
    let mut tensor = counting(&[6]);
    let address = tensor.bytes().unwrap().as_ptr();
    for round in 0..3 {
        let mut filled = tensor.try_into_mut().expect("the last one");
        filled.as_mut_slice::<u32>().unwrap()[0] = round;
        tensor = filled.freeze();
        assert_eq!(
            (tensor.as_slice::<u32>().unwrap()[0], tensor.bytes().unwrap().as_ptr()),
            (round, address)
        );
    }
    let pooled = TensorMut::in_pool(spec(Dtype::U32, &[6]), &pool).unwrap().freeze();
    let address = pooled.bytes().unwrap().as_ptr();
    assert_eq!(pooled.try_into_mut().expect("the last one").bytes().as_ptr(), address);
    assert_eq!(pool.statistics().leased_send, 0);
}
