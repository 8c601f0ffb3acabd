//! Where gradients lie: which bucket, and where in it. All ranks compute the same layout from rank 0's list.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use prost::Message;

use super::error::{FusionError, complete};

/// The gradients of the first step of rank 0, in the order in which they were given, as rank 0 sends it to the other ranks.
#[derive(Clone, PartialEq, Message)]
pub(super) struct List {
    /// The size of a bucket.
    #[prost(uint64, tag = "1")]
    pub(super) bucket_bytes: u64,
    #[prost(message, repeated, tag = "2")]
    pub(super) entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Entry {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(uint64, tag = "2")]
    pub(super) elements: u64,
}

/// The place of a gradient.
#[derive(Debug, Clone)]
pub(super) struct Gradient {
    pub(super) name: Arc<str>,
    pub(super) bucket: usize,
    /// In elements of the bucket.
    pub(super) range: Range<usize>,
}

/// The places of all gradients.
#[derive(Debug)]
pub(super) struct Layout {
    gradients: Vec<Gradient>,
    by_name: HashMap<Arc<str>, usize>,
    /// The number of elements of each bucket.
    buckets: Vec<usize>,
}

impl Layout {
    /// Puts the gradients into buckets of at most `limit` elements, in the order of the list. A longer gradient has a bucket of
    /// its own.
    pub(super) fn new(list: &List, limit: usize) -> Self {
        let mut buckets: Vec<usize> = Vec::new();
        let mut gradients = Vec::with_capacity(list.entries.len());
        for entry in &list.entries {
            let length = usize::try_from(entry.elements).unwrap_or(usize::MAX);
            match buckets.last() {
                Some(&filled) if filled.checked_add(length).is_some_and(|sum| sum <= limit) => {}
                _ => buckets.push(0),
            }
            let bucket = buckets.len() - 1;
            let begin = buckets[bucket];
            buckets[bucket] = begin.saturating_add(length);
            let name: Arc<str> = entry.name.as_str().into();
            gradients.push(Gradient { name, bucket, range: begin..buckets[bucket] });
        }
        let by_name =
            gradients.iter().enumerate().map(|(at, gradient)| (Arc::clone(&gradient.name), at)).collect();
        Self { gradients, by_name, buckets }
    }

    pub(super) fn gradients(&self) -> &[Gradient] {
        &self.gradients
    }

    /// Returns the number of elements of each bucket.
    pub(super) fn buckets(&self) -> &[usize] {
        &self.buckets
    }

    /// Returns the index of a gradient.
    ///
    /// # Errors
    /// There is no gradient of this name, or its length is not `length`.
    pub(super) fn find(&self, name: &str, length: usize) -> Result<usize, FusionError> {
        let Some(index) = self.index(name) else {
            return Err(FusionError::Unknown { name: name.into() });
        };
        let expected = self.gradients[index].range.len();
        if length != expected {
            return Err(FusionError::Length { name: name.into(), given: length, expected });
        }
        Ok(index)
    }

    pub(super) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }
}

/// Which gradients of a step are there, and which buckets may start.
#[derive(Debug)]
pub(super) struct Given {
    given: Vec<bool>,
    /// The number of gradients that each bucket still lacks.
    lacking: Vec<usize>,
    /// The first bucket that has not started. Buckets start in order, because all ranks must start the same operations in the
    /// same order.
    next: usize,
}

impl Given {
    pub(super) fn new(layout: &Layout) -> Self {
        let mut lacking = vec![0; layout.buckets.len()];
        for gradient in &layout.gradients {
            lacking[gradient.bucket] += 1;
        }
        Self { given: vec![false; layout.gradients.len()], lacking, next: 0 }
    }

    /// Fails if the gradient is already there.
    pub(super) fn check(&self, layout: &Layout, index: usize) -> Result<(), FusionError> {
        match self.given[index] {
            true => Err(FusionError::Twice { name: Arc::clone(&layout.gradients[index].name) }),
            false => Ok(()),
        }
    }

    /// Notes that a gradient is there, and returns the buckets that start now.
    pub(super) fn give(&mut self, layout: &Layout, index: usize) -> Range<usize> {
        if !std::mem::replace(&mut self.given[index], true) {
            self.lacking[layout.gradients[index].bucket] -= 1;
        }
        let first = self.next;
        while self.lacking.get(self.next) == Some(&0) {
            self.next += 1;
        }
        first..self.next
    }

    /// Fails if a gradient is not there, and names all of these.
    pub(super) fn complete(&self, layout: &Layout) -> Result<(), FusionError> {
        complete(layout.gradients.iter().map(|gradient| &gradient.name).zip(&self.given))
    }
}
