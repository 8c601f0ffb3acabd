//! Where gradients lie: which bucket, and where in it. All ranks compute the same layout from rank 0's list.
//! Until they have agreed on it, each gradient of the first step has a bucket of its own.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use prost::Message;

use super::complete;
use crate::error::{CollectiveError, argument};

/// The gradients of the first step of rank 0, in the order in which they were given, as rank 0 sends it to
/// the other ranks.
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

/// Where a gradient lies.
#[derive(Debug, Clone)]
pub(super) struct Gradient {
    pub(super) name: Arc<str>,
    pub(super) bucket: usize,
    /// In elements of the bucket.
    pub(super) range: Range<usize>,
}

/// Where all gradients lie.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) gradients: Vec<Gradient>,
    by_name: HashMap<Arc<str>, usize>,
    /// The number of elements of each bucket.
    pub(super) buckets: Vec<usize>,
}

impl Layout {
    /// Puts the gradients into buckets of at most `limit` elements, in the order of the list. A longer
    /// gradient has a bucket of its own.
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

    /// Returns the index of a gradient.
    ///
    /// # Errors
    /// There is no gradient of this name, or its length is not `length`.
    pub(super) fn find(&self, name: &str, length: usize) -> Result<usize, CollectiveError> {
        let Some(index) = self.index(name) else {
            return Err(argument(format!(
                "gradient `{name}` was not part of the first step, so it is in no bucket; give the same gradients in \
                 every step, or build a new fusion"
            )));
        };
        let expected = self.gradients[index].range.len();
        if length != expected {
            return Err(argument(format!(
                "gradient `{name}` has {length} elements, and had {expected} before; its length may not change"
            )));
        }
        Ok(index)
    }

    pub(super) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Adds a gradient in a bucket of its own. Returns its index.
    pub(super) fn add(&mut self, name: &str, length: usize) -> usize {
        let (name, index, bucket): (Arc<str>, _, _) = (name.into(), self.gradients.len(), self.buckets.len());
        self.by_name.insert(Arc::clone(&name), index);
        self.buckets.push(length);
        self.gradients.push(Gradient { name, bucket, range: 0..length });
        index
    }

    /// Returns the list of these gradients, in this order of their indices.
    pub(super) fn list(&self, order: &[usize], bucket_bytes: u64) -> List {
        let entry = |gradient: &Gradient| Entry {
            name: gradient.name.to_string(),
            elements: gradient.range.len() as u64,
        };
        List { bucket_bytes, entries: order.iter().map(|&index| entry(&self.gradients[index])).collect() }
    }

    /// Returns the first difference between these gradients and rank 0's.
    pub(super) fn compare(&self, list: &List) -> Option<Problem> {
        for (at, entry) in list.entries.iter().enumerate() {
            match self.index(&entry.name).map(|index| self.gradients[index].range.len() as u64) {
                None => return Some(Problem::Missing(at)),
                Some(length) if length != entry.elements => return Some(Problem::Length(at)),
                Some(_) => {}
            }
        }
        let theirs: HashSet<&str> = list.entries.iter().map(|entry| entry.name.as_str()).collect();
        let extra = self.gradients.iter().find(|gradient| !theirs.contains(&*gradient.name));
        extra.map(|gradient| Problem::Extra(Some(Arc::clone(&gradient.name))))
    }
}

/// Which gradients of a step are there, and which buckets may start.
#[derive(Debug, Default)]
pub(super) struct Given {
    given: Vec<bool>,
    /// The number of gradients that each bucket still lacks.
    lacking: Vec<usize>,
    /// The first bucket that has not started. Buckets start in order, because all ranks must start the same
    /// operations in the same order.
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

    /// Adds a gradient in a bucket of its own.
    pub(super) fn add(&mut self) {
        self.given.push(false);
        self.lacking.push(1);
    }

    /// Fails if the gradient is already there.
    pub(super) fn check(&self, layout: &Layout, index: usize) -> Result<(), CollectiveError> {
        let name = &layout.gradients[index].name;
        match self.given[index] {
            true => Err(argument(format!(
                "gradient `{name}` was given twice in one step; add its parts up first"
            ))),
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

    /// Fails if gradients are not there, and names the first few of these.
    pub(super) fn complete(&self, layout: &Layout) -> Result<(), CollectiveError> {
        complete(layout.gradients.iter().map(|gradient| &gradient.name).zip(&self.given))
    }
}

/// A difference between the gradients of a rank and rank 0's list.
#[derive(Debug)]
pub(super) enum Problem {
    /// Indices of the list.
    Missing(usize),
    Length(usize),
    /// The name, which only the rank itself knows.
    Extra(Option<Arc<str>>),
    Unreadable,
}

impl Problem {
    /// Returns a number that is not 0.
    pub(super) fn code(&self) -> u64 {
        match self {
            Self::Missing(at) => (*at as u64) << 2 | 1,
            Self::Length(at) => (*at as u64) << 2 | 2,
            Self::Extra(_) => 3,
            Self::Unreadable => 4,
        }
    }

    pub(super) fn from_code(code: u64) -> Self {
        match code & 3 {
            1 => Self::Missing((code >> 2) as usize),
            2 => Self::Length((code >> 2) as usize),
            3 => Self::Extra(None),
            _ => Self::Unreadable,
        }
    }

    pub(super) fn describe(&self, rank: usize, list: &List) -> String {
        let name = |at: usize| list.entries.get(at).map_or("of an unknown name", |entry| &*entry.name);
        match self {
            Self::Missing(at) => {
                format!("rank {rank} did not give gradient `{}`, which rank 0 gave", name(*at))
            }
            Self::Length(at) => {
                format!("rank {rank} gave gradient `{}` with another length than rank 0", name(*at))
            }
            Self::Extra(Some(own)) => {
                format!("rank {rank}, this rank, gave gradient `{own}`, which rank 0 did not give")
            }
            Self::Extra(None) => format!("rank {rank} gave a gradient that rank 0 did not give"),
            Self::Unreadable => format!("rank {rank} could not read rank 0's list of gradients"),
        }
    }
}
