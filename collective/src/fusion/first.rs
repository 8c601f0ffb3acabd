//! The gradients of the first step, before the ranks have agreed on their order.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::error::{FusionError, complete};
use super::layout::{Entry, List};
use crate::reduce::Number;

/// The gradients of the first step of this rank.
pub(super) struct First<T> {
    by_name: HashMap<Arc<str>, usize>,
    gradients: Vec<(Arc<str>, Vec<T>)>,
    /// The order in which they were given, as indices of `gradients`.
    order: Vec<usize>,
    given: Vec<bool>,
}

impl<T> Default for First<T> {
    fn default() -> Self {
        Self { by_name: HashMap::new(), gradients: Vec::new(), order: Vec::new(), given: Vec::new() }
    }
}

impl<T: Number> First<T> {
    pub(super) fn slot(&mut self, name: &str, length: usize) -> Result<(usize, &mut [T]), FusionError> {
        let index = match self.by_name.get(name) {
            Some(&index) if self.given[index] => return Err(FusionError::Twice { name: name.into() }),
            Some(&index) => index,
            None => {
                let name: Arc<str> = name.into();
                self.by_name.insert(Arc::clone(&name), self.gradients.len());
                self.gradients.push((name, bytemuck::zeroed_vec(length)));
                self.given.push(false);
                self.gradients.len() - 1
            }
        };
        let values = &mut self.gradients[index].1;
        if values.len() != length {
            return Err(FusionError::Length { name: name.into(), given: length, expected: values.len() });
        }
        Ok((index, values))
    }

    pub(super) fn ready(&mut self, index: usize) {
        if !std::mem::replace(&mut self.given[index], true) {
            self.order.push(index);
        }
    }

    pub(super) fn elements(&self, index: usize) -> Option<&[T]> {
        self.gradients.get(index).map(|(_, values)| &values[..])
    }

    pub(super) fn elements_mut(&mut self, index: usize) -> Option<&mut [T]> {
        self.gradients.get_mut(index).map(|(_, values)| &mut values[..])
    }

    pub(super) fn complete(&self) -> Result<(), FusionError> {
        complete(self.gradients.iter().map(|(name, _)| name).zip(&self.given))
    }

    pub(super) fn values(&self, name: &str) -> Option<&[T]> {
        self.by_name.get(name).map(|&index| &self.gradients[index].1[..])
    }

    pub(super) fn list(&self, bucket_bytes: u64) -> List {
        let gradients = self.order.iter().map(|&index| &self.gradients[index]);
        let entries = gradients
            .map(|(name, values)| Entry { name: name.to_string(), elements: values.len() as u64 })
            .collect();
        List { bucket_bytes, entries }
    }

    /// Returns the first difference between these gradients and rank 0's.
    pub(super) fn compare(&self, list: &List) -> Option<Problem> {
        for (at, entry) in list.entries.iter().enumerate() {
            match self.values(&entry.name) {
                None => return Some(Problem::Missing(at)),
                Some(values) if values.len() as u64 != entry.elements => return Some(Problem::Length(at)),
                Some(_) => {}
            }
        }
        let theirs: HashSet<&str> = list.entries.iter().map(|entry| entry.name.as_str()).collect();
        let extra = self.gradients.iter().find(|(name, _)| !theirs.contains(&**name));
        extra.map(|(name, _)| Problem::Extra(Some(Arc::clone(name))))
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
