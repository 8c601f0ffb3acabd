//! Tensors of the engine tract in the memory of regions.

use bytes::Bytes;
use tonic_rdma_verbs::memory::Budget;
use tonic_rdma_verbs::unstable::{HostedTensor, RegionPool};
use tract_data::prelude::{DatumType, Tensor};

use super::{execute, site, trace};

const SHAPE: [usize; 2] = [250, 40];

fn pool() -> RegionPool {
    RegionPool::new(Budget::new(1 << 30))
}

/// Makes a tensor of floats whose content is `value`, as a device writes it into the region.
fn made(trace: &tonic_rdma_verbs::memory::sites::SiteAllocator, pool: &RegionPool, value: f32) -> Tensor {
    let hosted = execute(trace, 3, || HostedTensor::new(pool, DatumType::F32, &SHAPE));
    let (mut region, tensor) = hosted.unwrap().unwrap();
    assert_eq!(region.len(), 40_000);
    region.chunks_exact_mut(4).for_each(|element| element.copy_from_slice(&value.to_ne_bytes()));
    let address = region.as_ptr();
    let tensor = tensor.with_content(region).unwrap();
    assert_eq!(tensor.as_bytes().as_ptr(), address, "nothing was copied");
    tensor
}

#[test]
fn the_engine_gets_what_is_in_the_region_without_a_copy() {
    let (trace, pool) = (trace(), pool());
    let mut tensor = made(&trace, &pool, 1.5);
    assert_eq!((tensor.shape(), tensor.as_slice::<f32>().unwrap()), (&SHAPE[..], &[1.5; 10_000][..]));
    // The engine changes it in place, reshapes it, and frees it in another thread.
    tensor.as_slice_mut::<f32>().unwrap()[7] = 0.0;
    let tensor = tensor.into_shape(&[10_000]).unwrap();
    assert_eq!(pool.statistics().leased_receive, 49_152);
    std::thread::spawn(move || drop(tensor)).join().unwrap();
    assert_eq!(pool.statistics().leased_receive, 0);
    // The next one has the same memory, and other content.
    assert_eq!(made(&trace, &pool, 2.0).as_slice::<f32>().unwrap(), [2.0; 10_000]);
}

#[test]
fn a_hosted_tensor_that_is_passed_on_is_sent_from_where_it_lies() {
    struct Owner(Tensor);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            self.0.as_bytes()
        }
    }
    let (trace, pool) = (trace(), pool());
    let shared = Bytes::from_owner(Owner(made(&trace, &pool, 1.0)));
    let crossed = trace.crossed(&shared);
    assert_eq!((crossed.site, crossed.registered), (site(3, 0), true));
}

#[test]
fn the_bytes_have_one_owner_whatever_is_dropped_first() {
    let (trace, pool) = (trace(), pool());
    let hosted =
        || execute(&trace, 3, || HostedTensor::new(&pool, DatumType::I64, &[1000])).unwrap().unwrap();
    let (mut region, tensor) = hosted();
    drop(tensor);
    region.fill(7);
    let (other, private) = hosted();
    assert_ne!(other.as_ptr(), region.as_ptr(), "the memory is still that of the region");
    // A region of another tensor, and a part of the own one, are refused.
    let (private, mut region) = *private.with_content(region).unwrap_err();
    assert!(private.is_in(&other) && !private.is_in(&region));
    drop(region.split_off(1));
    let mut other = other;
    let rest = other.split_off(8);
    let (private, other) = *private.with_content(other).unwrap_err();
    drop((rest, other, region));
    assert!(pool.statistics().leased_receive > 0, "the tensor holds the memory");
    drop(private);
    assert_eq!(pool.statistics().leased_receive, 0);
}

#[test]
fn what_can_not_be_hosted_is_left_to_the_engine() {
    let (trace, pool) = (trace(), pool());
    let hosted = |datum, shape: &[usize]| {
        execute(&trace, 3, || HostedTensor::new(&pool, datum, shape)).map(|hosted| hosted.is_some())
    };
    assert!(hosted(DatumType::U8, &[1]).unwrap());
    for datum in [DatumType::String, DatumType::TDim, DatumType::Bool, DatumType::Opaque] {
        assert!(!hosted(datum, &[4]).unwrap(), "{datum:?}");
    }
    assert!(!hosted(DatumType::F32, &[0, 4]).unwrap(), "no bytes");
    assert!(!hosted(DatumType::F32, &[usize::MAX, 4]).unwrap(), "more than there are addresses");
    // Nothing is executed, so the allocator traces nothing.
    assert!(HostedTensor::new(&pool, DatumType::F32, &[4]).unwrap().is_none());
    let small = RegionPool::new(Budget::new(4096));
    assert!(execute(&trace, 3, || HostedTensor::new(&small, DatumType::F32, &[10_000])).is_err());
    assert_eq!(pool.statistics().leased_receive, 0);
}
