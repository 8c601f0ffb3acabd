use std::time::Duration;

use crate::fusion::layout::{Entry, List};
use crate::fusion::size::BucketSize;

fn list(bucket_bytes: Option<u64>, gradients: usize, elements: u64) -> List {
    let entry = |at| Entry { name: format!("gradient {at}"), elements };
    List { bucket_bytes, entries: (0..gradients).map(entry).collect() }
}

#[test]
fn a_pinned_size_is_not_measured() {
    let mut size = BucketSize::new(&list(Some(3 << 20), 100, 100_000), 4);
    assert!(!size.measuring());
    assert_eq!(size.bytes(), 3 << 20);
    assert_eq!(size.record(Duration::from_secs(1)), None);
    assert_eq!(size.to_string(), "buckets of 3 MiB, because `bucket_bytes` says so");
}

#[test]
fn sizes_with_the_same_buckets_are_not_compared() {
    // 40 kB fit into the smallest bucket.
    let size = BucketSize::new(&list(None, 10, 1_000), 4);
    assert!(!size.measuring());
    assert_eq!(size.to_string(), "buckets of 256 KiB, because other sizes give the same buckets");
    // One gradient is one bucket of any size.
    assert!(!BucketSize::new(&list(None, 1, 100 << 20), 4).measuring());
    assert!(!BucketSize::new(&list(None, 0, 0), 4).measuring());
}

/// Measures with the given times for a step of each size, and returns the sizes of all steps and the choice.
fn measure(size: &mut BucketSize, time: impl Fn(usize, usize) -> Duration) -> (Vec<usize>, u64) {
    let mut sizes = Vec::new();
    for step in 0..1_000 {
        assert!(size.measuring());
        sizes.push(size.bytes());
        if let Some(choice) = size.record(time(size.bytes(), step)) {
            return (sizes, choice);
        }
    }
    panic!("the measurement does not end");
}

#[test]
fn the_size_with_the_quickest_median_is_kept() {
    let mut size = BucketSize::new(&list(None, 100, 100_000), 4);
    // The first step of each size is slow, and one step of the best size too; neither decides.
    let (sizes, choice) = measure(&mut size, |bytes, step| match (bytes, step % 4) {
        (_, 0) => Duration::from_millis(500),
        (4_194_304, 2) => Duration::from_millis(400),
        (4_194_304, _) => Duration::from_millis(10),
        _ => Duration::from_millis(20),
    });
    // 40 MB: 64 MiB hold all of it, so 256 MiB give the same bucket.
    let expected: [usize; 5] = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
    assert_eq!(sizes, expected.iter().flat_map(|&bytes| [bytes; 4]).collect::<Vec<_>>());
    assert!(size.settle(choice, 0));
    assert!(!size.measuring());
    assert_eq!(size.bytes(), 4 << 20);
    assert_eq!(
        size.to_string(),
        "buckets of 4 MiB, because steps were the quickest with it: 20.0ms with 256 KiB, 20.0ms with 1 MiB, 10.0ms with 4 \
         MiB, 20.0ms with 16 MiB, 20.0ms with 64 MiB"
    );
}

#[test]
fn rank_0_decides_against_the_times_of_this_rank() {
    let mut size = BucketSize::new(&list(None, 100, 100_000), 4);
    let (_, own) = measure(&mut size, |bytes, _| Duration::from_micros(bytes as u64));
    assert_eq!(own, 0);
    assert!(!size.settle(9, 1));
    assert!(size.settle(3, 1));
    assert_eq!(size.bytes(), 16 << 20);
    assert!(size.to_string().contains("rank 0's steps were the quickest with it"), "{size}");
}
