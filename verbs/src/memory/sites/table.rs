//! The sites of an allocator.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

use super::record::SiteRecord;
use super::report::Site;

/// The sites of an allocator by location and by name, and its current iteration.
#[derive(Debug)]
pub(super) struct SiteTable {
    located: HashMap<&'static Location<'static>, Arc<SiteRecord>>,
    named: HashMap<Arc<str>, NamedSites>,
    records: Vec<Arc<SiteRecord>>,
    limit: usize,
    pub(super) iteration: u64,
    /// Number of buffers of sites beyond the limit.
    pub(super) untracked: u64,
}

/// The sites of one name: one for each allocation of an iteration, in the order of the allocations.
#[derive(Debug, Default)]
struct NamedSites {
    /// Index of the site of the next allocation.
    next: usize,
    records: Vec<Arc<SiteRecord>>,
}

impl SiteTable {
    /// Makes an empty table for at most `limit` sites, in the first iteration.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            located: HashMap::new(),
            named: HashMap::new(),
            records: Vec::new(),
            limit,
            iteration: 1,
            untracked: 0,
        }
    }

    /// Returns the site at a place of the source, or `None` if that would be one site too many.
    pub(super) fn at(&mut self, location: &'static Location<'static>) -> Option<Arc<SiteRecord>> {
        if let Some(record) = self.located.get(location) {
            return Some(Arc::clone(record));
        }
        let record = self.add(|| Site::Location(location))?;
        self.located.insert(location, Arc::clone(&record));
        Some(record)
    }

    /// Returns the site of the next allocation under `name` in this iteration, or `None` if that would be one site too many.
    pub(super) fn named(&mut self, name: &str) -> Option<Arc<SiteRecord>> {
        if let Some(named) = self.named.get_mut(name)
            && let Some(record) = named.records.get(named.next)
        {
            named.next += 1;
            return Some(Arc::clone(record));
        }
        let shared: Arc<str> =
            self.named.get_key_value(name).map_or_else(|| name.into(), |(key, _)| Arc::clone(key));
        let ordinal = self.named.get(name).map_or(0, |named| named.records.len());
        let record = self.add(|| Site::Named { name: Arc::clone(&shared), ordinal })?;
        let named = self.named.entry(shared).or_default();
        named.records.push(Arc::clone(&record));
        named.next = named.records.len();
        Some(record)
    }

    /// Ends the iteration.
    pub(super) fn next_iteration(&mut self, patience: u32) {
        self.records.iter().for_each(|record| record.learn(self.iteration, patience));
        self.named.values_mut().for_each(|named| named.next = 0);
        self.iteration += 1;
    }

    /// Returns all sites.
    pub(super) fn records(&self) -> &[Arc<SiteRecord>] {
        &self.records
    }

    /// Adds a site, unless there are too many.
    fn add(&mut self, site: impl FnOnce() -> Site) -> Option<Arc<SiteRecord>> {
        if self.records.len() >= self.limit {
            self.untracked += 1;
            return None;
        }
        let record = Arc::new(SiteRecord::new(site(), self.iteration));
        self.records.push(Arc::clone(&record));
        Some(record)
    }
}
