//! Tensors through DLPack: to another library and back, and from a library with wrong tensors.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tonic_rdma::memory::dlpack::{
    DlDataType, DlDevice, DlManagedTensor, DlTensor, Exported, Imported, Layout,
};
use tonic_rdma_tensor::{Dtype, Shape, Tensor, TensorErrorKind, TensorMut, TensorSpec};
use tonic_rdma_tensor::{VerbsError, VerbsErrorKind};

const F32: DlDataType = DlDataType { code: 2, bits: 32, lanes: 1 };

/// A tensor of another library, with a count of its deletions.
struct Foreign {
    managed: DlManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _elements: Arc<Vec<f32>>,
    deleted: Arc<AtomicUsize>,
}

impl Foreign {
    /// Creates a tensor, which is row-major if `strides` is empty.
    fn new(elements: &Arc<Vec<f32>>, shape: &[i64], strides: &[i64]) -> (Box<Self>, Arc<AtomicUsize>) {
        let deleted = Arc::new(AtomicUsize::new(0));
        let mut foreign = Box::new(Self {
            managed: DlManagedTensor {
                dl_tensor: DlTensor {
                    data: elements.as_ptr().cast_mut().cast(),
                    device: DlDevice::CPU,
                    ndim: shape.len() as i32,
                    dtype: F32,
                    shape: std::ptr::null_mut(),
                    strides: std::ptr::null_mut(),
                    byte_offset: 0,
                },
                manager_ctx: std::ptr::null_mut(),
                deleter: Some(Self::delete),
            },
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            _elements: Arc::clone(elements),
            deleted: Arc::clone(&deleted),
        });
        foreign.managed.dl_tensor.shape = foreign.shape.as_mut_ptr();
        if !strides.is_empty() {
            foreign.managed.dl_tensor.strides = foreign.strides.as_mut_ptr();
        }
        (foreign, deleted)
    }

    fn import(self: Box<Self>) -> Result<Imported, VerbsError> {
        let foreign = Box::leak(self);
        let context = NonNull::from(foreign);
        // SAFETY:
        // - the box was just leaked, and only its deleter frees it, and
        // - its pointers point to its vectors, which have `ndim` elements; threads only read the elements.
        unsafe {
            (*context.as_ptr()).managed.manager_ctx = context.as_ptr().cast();
            Imported::from_raw(NonNull::new(&raw mut (*context.as_ptr()).managed).unwrap())
        }
    }

    unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
        // SAFETY: `import` put the box there. The tests check that there is only one call.
        let foreign = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Self>()) };
        foreign.deleted.fetch_add(1, Ordering::SeqCst);
    }
}

fn elements() -> Arc<Vec<f32>> {
    Arc::new((0..24_u8).map(f32::from).collect())
}

#[test]
fn memory_of_another_library_is_borrowed_and_given_back_once() {
    let elements = elements();
    let (foreign, deleted) = Foreign::new(&elements, &[4, 6], &[]);
    let tensor = Tensor::from_dlpack(foreign.import().unwrap()).unwrap();
    assert_eq!(tensor.as_slice::<f32>().unwrap(), &elements[..]);
    assert_eq!(tensor.as_slice::<f32>().unwrap().as_ptr(), elements.as_ptr(), "not copied");
    let part = tensor.slice(1..2).unwrap();
    drop(tensor);
    assert_eq!(deleted.load(Ordering::SeqCst), 0, "a part is still in use");
    std::thread::spawn(move || assert_eq!(part.as_slice::<f32>().unwrap()[0], 6.0)).join().unwrap();
    assert_eq!((deleted.load(Ordering::SeqCst), Arc::strong_count(&elements)), (1, 1));
}

#[test]
fn strides_and_offsets_are_followed() {
    let elements = elements();
    // Columns 1 and 4 of four rows of six elements, in column-major order.
    let (mut foreign, deleted) = Foreign::new(&elements, &[2, 4], &[3, 6]);
    foreign.managed.dl_tensor.byte_offset = 4;
    let tensor = Tensor::from_dlpack(foreign.import().unwrap()).unwrap();
    let packed = tensor.to_contiguous().unwrap();
    assert_eq!(packed.as_slice::<f32>().unwrap(), [1.0, 7.0, 13.0, 19.0, 4.0, 10.0, 16.0, 22.0]);
    drop(tensor);
    assert_eq!(deleted.load(Ordering::SeqCst), 1);
}

#[test]
fn a_tensor_goes_out_and_comes_back() {
    for dtype in Dtype::all().filter(|dtype| dtype.size().is_some()) {
        let spec = TensorSpec::new(dtype, Shape::new(&[3, 4]).unwrap()).unwrap();
        let mut tensor = TensorMut::zeroed(spec).unwrap();
        tensor.bytes_mut().iter_mut().enumerate().for_each(|(place, byte)| *byte = (place % 2) as u8);
        let view = tensor.freeze().slice(1..3).unwrap().transpose();
        let exported = view.to_dlpack().unwrap().into_raw();
        // SAFETY: just exported, from tensors that no thread writes and any thread may drop.
        let back = Tensor::from_dlpack(unsafe { Imported::from_raw(exported) }.unwrap()).unwrap();
        assert_eq!((back.spec(), back.strides()), (view.spec(), view.strides()));
        assert_eq!(back.to_contiguous().unwrap().bytes(), view.to_contiguous().unwrap().bytes());
    }
    let strings = Tensor::from_strings(Shape::new(&[1]).unwrap(), ["a"]).unwrap();
    assert!(strings.to_dlpack().unwrap_err().reason().starts_with("string where a type of fixed size"));
}

#[test]
fn exported_memory_lives_until_the_consumer_is_done() {
    struct Owner(Arc<Mutex<usize>>, [u8; 4]);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.1
        }
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        }
    }
    let drops = Arc::new(Mutex::new(0));
    let dropped = || *drops.lock().unwrap();
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4]).unwrap()).unwrap();
    let tensor =
        Tensor::from_bytes(spec, Bytes::from_owner(Owner(Arc::clone(&drops), [1, 2, 3, 4]))).unwrap();
    drop(tensor.to_dlpack().unwrap());
    let managed = tensor.to_dlpack().unwrap().into_raw();
    drop(tensor);
    assert_eq!(dropped(), 0);
    // SAFETY: a consumer reads the memory, and then calls the deleter once.
    unsafe {
        assert_eq!(*managed.as_ref().dl_tensor.data.cast::<u8>().add(3), 4);
        (managed.as_ref().deleter.unwrap())(managed.as_ptr());
    }
    assert_eq!(dropped(), 1);
}

#[test]
fn a_bad_tensor_is_refused_with_the_reason_and_deleted() {
    type Change = fn(&mut Foreign);
    let cases: [(Change, &str); 10] = [
        (|f| f.managed.dl_tensor.device.device_type = 2, "device type 2, which is no host memory"),
        (|f| f.managed.dl_tensor.ndim = -1, "-1 dimensions"),
        (|f| f.managed.dl_tensor.ndim = i32::MAX, "2147483647 dimensions"),
        (|f| f.shape[1] = -6, "dimension 1 of length -6"),
        (|f| f.strides[0] = -1, "dimension 0 with stride -1"),
        (|f| f.shape[0] = i64::MAX, "more bytes than memory can have"),
        (|f| f.managed.dl_tensor.data = std::ptr::null_mut(), "null pointer"),
        (|f| f.managed.dl_tensor.shape = std::ptr::null_mut(), "null pointer"),
        (|f| f.managed.dl_tensor.dtype.bits = 4, "elements of 4 bits in 1 lanes"),
        (|f| f.managed.dl_tensor.byte_offset = u64::MAX, "more bytes than memory can have"),
    ];
    for (change, expected) in cases {
        let (mut foreign, deleted) = Foreign::new(&elements(), &[4, 6], &[6, 1]);
        change(&mut foreign);
        let error = foreign.import().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, not {expected}");
        assert_eq!(deleted.load(Ordering::SeqCst), 1, "{expected}");
    }
}

#[test]
fn a_tensor_of_an_unsupported_kind_is_deleted() {
    let cases: [(&[i64], DlDataType, &str); 3] = [
        (&[24], DlDataType { code: 8, bits: 8, lanes: 1 }, "unknown type: code 8"),
        (&[6], DlDataType { code: 2, bits: 32, lanes: 4 }, "4 lanes"),
        (&[1; 17], F32, "17 dimensions"),
    ];
    for (shape, dtype, expected) in cases {
        let (mut foreign, deleted) = Foreign::new(&elements(), shape, &[]);
        foreign.managed.dl_tensor.dtype = dtype;
        let error = Tensor::from_dlpack(foreign.import().unwrap()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(deleted.load(Ordering::SeqCst), 1);
    }
    let (mut foreign, deleted) = Foreign::new(&elements(), &[5], &[]);
    foreign.managed.dl_tensor.byte_offset = 2;
    let error = Tensor::from_dlpack(foreign.import().unwrap()).unwrap_err();
    assert_eq!(error.kind(), TensorErrorKind::Layout, "{error}");
    assert_eq!(deleted.load(Ordering::SeqCst), 1);
}

#[test]
fn nothing_is_exported_beyond_its_memory() {
    let layout = |shape: &[u64], strides: &[u64]| Layout {
        dtype: F32,
        shape: shape.to_vec(),
        strides: strides.to_vec(),
    };
    let fault = |reason: &'static str| VerbsError::new(VerbsErrorKind::InvalidArgument, reason);
    let export = |layout| Exported::new(Bytes::from(vec![0; 16]), &layout).map(drop);
    assert_eq!(export(layout(&[4], &[1])), Ok(()));
    assert_eq!(export(layout(&[0, 9], &[9, 1])), Ok(()));
    assert_eq!(export(layout(&[2, 2], &[3, 1])), Err(fault("a tensor of 20 bytes in memory of 16")));
    assert_eq!(export(layout(&[2], &[u64::MAX])), Err(fault("a tensor of more bytes than memory can have")));
    assert!(export(layout(&[4], &[])).is_err());
}
