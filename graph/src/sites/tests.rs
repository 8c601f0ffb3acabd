#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::alloc::System;

use tonic_rdma::memory::trace::TracingAllocator;
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

use super::*;
use crate::dataflow::{Fact, Node, Role};

/// The allocator of all unit tests of this crate.
#[global_allocator]
static ALLOCATOR: TracingAllocator = TracingAllocator::new(System);

const LENGTH: usize = 50_000;

/// A graph of two inputs.
fn graph() -> Topology {
    let mut graph = Topology::new();
    for name in ["first", "second"] {
        let (name, kind) = (name.to_owned(), "Test".to_owned());
        let outputs = vec![Fact::known(Dtype::U8, &[LENGTH as u64])];
        graph
            .add(Node { name, kind, role: Role::Input, inputs: vec![], outputs, work: 0, stays: false })
            .unwrap();
    }
    graph
}

fn tensor(content: Vec<u8>) -> Tensor {
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[content.len() as u64]).unwrap()).unwrap();
    Tensor::from_bytes(spec, content.into()).unwrap()
}

#[test]
fn what_a_node_allocated_is_registered_from_the_second_step() {
    let sites = NodeSites::new(&graph(), 1 << 20);
    assert!(sites.is_traced());
    for step in 0..4 {
        let scope = sites.enter(NodeId(1));
        let other = vec![1u8; LENGTH / 2];
        let content = vec![2u8; LENGTH];
        drop(scope);
        // Nodes that change the content in place, or pass it on.
        let scope = sites.enter(NodeId(0));
        let tensor = tensor(content);
        drop(scope);
        sites.crossed(CrossingId(3), &tensor);
        let seen = sites.seen(CrossingId(3));
        assert_eq!(seen.site, Some(AllocationSite { owner: SiteOwner::Node(1), ordinal: 1 }), "{seen:?}");
        assert_eq!((seen.tensors, seen.registered, seen.bytes), (step + 1, step, LENGTH as u64));
        assert_eq!(tensor.registered().is_some(), step > 0, "the device reads it in place");
        drop(other);
    }
    assert_eq!(sites.seen(CrossingId(0)), CrossingMemory::default());
    let report = sites.trace.as_ref().map(SiteAllocator::report).unwrap();
    assert_eq!((report.sites.len(), report.placed, report.refused), (1, 3, 0), "{report}");
}

#[test]
fn what_arrives_is_registered_if_it_is_passed_on() {
    let sites = NodeSites::new(&graph(), 1 << 20);
    for step in 0..3 {
        // A poll that finds nothing.
        drop(sites.begin(SiteOwner::Receive(7)));
        let scope = sites.begin(SiteOwner::Receive(7));
        let content = vec![step; LENGTH];
        drop(scope);
        sites.crossed(CrossingId(1), &tensor(content));
    }
    let seen = sites.seen(CrossingId(1));
    assert_eq!(seen.site, Some(AllocationSite { owner: SiteOwner::Receive(7), ordinal: 0 }));
    assert_eq!((seen.tensors, seen.registered), (3, 2));
}

#[test]
fn what_no_node_allocated_has_no_site() {
    let sites = NodeSites::new(&graph(), 1 << 20);
    let constant = tensor(vec![1; LENGTH]);
    for _ in 0..3 {
        sites.crossed(CrossingId(0), &constant);
    }
    let seen = sites.seen(CrossingId(0));
    assert_eq!((seen.site, seen.tensors, seen.registered), (None, 3, 0));
}

#[test]
fn a_full_pool_is_no_error() {
    let sites = NodeSites::new(&graph(), 0);
    for step in 0..3 {
        let scope = sites.enter(NodeId(0));
        let content = vec![step; LENGTH];
        drop(scope);
        sites.crossed(CrossingId(0), &tensor(content));
    }
    let seen = sites.seen(CrossingId(0));
    assert_eq!((seen.site.is_some(), seen.tensors, seen.registered), (true, 3, 0));
}

#[test]
fn without_the_allocator_tensors_are_counted() {
    let sites = NodeSites::untraced(&graph());
    for step in 0..3 {
        let scope = sites.enter(NodeId(0));
        let content = vec![step; LENGTH];
        drop(scope);
        sites.crossed(CrossingId(0), &tensor(content));
    }
    assert!(!sites.is_traced());
    let expected = CrossingMemory { site: None, tensors: 3, registered: 0, bytes: LENGTH as u64 };
    assert_eq!(sites.seen(CrossingId(0)), expected);
}
