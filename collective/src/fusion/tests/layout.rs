use proptest::prelude::*;

use crate::fusion::layout::{Entry, Given, Layout, List};

fn list(lengths: &[usize]) -> List {
    let entries = lengths.iter().enumerate();
    let entries = entries
        .map(|(at, &length)| Entry { name: format!("gradient {at}"), elements: length as u64 })
        .collect();
    List { bucket_bytes: 0, entries }
}

#[test]
fn gradients_fill_buckets_in_their_order() {
    let layout = Layout::new(&list(&[3, 4, 2, 20, 1, 9]), 9);
    assert_eq!(layout.buckets, [9, 20, 1, 9]);
    let places: Vec<_> =
        layout.gradients.iter().map(|gradient| (gradient.bucket, gradient.range.clone())).collect();
    assert_eq!(places, [(0, 0..3), (0, 3..7), (0, 7..9), (1, 0..20), (2, 0..1), (3, 0..9)]);
}

#[test]
fn lengths_of_a_broken_list_cause_no_overflow() {
    let mut list = list(&[1, 2]);
    list.entries[0].elements = u64::MAX;
    let layout = Layout::new(&list, usize::MAX);
    assert_eq!(layout.buckets.len(), 2);
}

proptest! {
    #[test]
    fn each_gradient_has_a_place_of_its_own(
        lengths in prop::collection::vec(0..50_usize, 0..40),
        limit in 0..120_usize,
    ) {
        let layout = Layout::new(&list(&lengths), limit);
        let mut ends = vec![0; layout.buckets.len()];
        let mut members = ends.clone();
        for (gradient, &length) in layout.gradients.iter().zip(&lengths) {
            // Each begins where the one before it ends, so no two share an element.
            prop_assert_eq!(gradient.range.start, ends[gradient.bucket]);
            prop_assert_eq!(gradient.range.len(), length);
            ends[gradient.bucket] = gradient.range.end;
            members[gradient.bucket] += 1;
        }
        prop_assert_eq!(&ends, &layout.buckets);
        for (&elements, members) in layout.buckets.iter().zip(members) {
            prop_assert!(elements <= limit || members == 1);
        }
        prop_assert!(layout.gradients.is_sorted_by_key(|gradient| gradient.bucket));
    }

    #[test]
    fn buckets_start_in_order_in_any_order_of_the_gradients(
        lengths in prop::collection::vec(1..50_usize, 1..40),
        limit in 1..120_usize,
        seed in any::<u64>(),
    ) {
        let layout = Layout::new(&list(&lengths), limit);
        let mut given = Given::new(&layout);
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        let mut started = 0;
        for (count, &index) in order.iter().enumerate() {
            prop_assert!(given.check(&layout, index).is_ok());
            prop_assert!(given.complete(&layout).is_err());
            let now = given.give(&layout, index);
            prop_assert!(given.check(&layout, index).is_err());
            prop_assert_eq!(now.start, started);
            started = now.end;
            // The started buckets are exactly the first full ones.
            let there = &order[..=count];
            let full = |bucket: usize| {
                let mut members = layout.gradients.iter().enumerate().filter(|(_, one)| one.bucket == bucket);
                members.all(|(index, _)| there.contains(&index))
            };
            prop_assert!((0..started).all(full));
            prop_assert!(started == layout.buckets.len() || !full(started));
        }
        prop_assert_eq!(started, layout.buckets.len());
        prop_assert!(given.complete(&layout).is_ok());
    }
}
