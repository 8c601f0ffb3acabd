//! The sites of an allocator.

use std::collections::HashMap;
use std::panic::Location;
use std::sync::Arc;

use super::record::SiteRecord;
use super::report::Site;

/// Sites by how the program names them, and the iteration that it is in.
#[derive(Debug)]
pub(super) struct SiteTable {
    located: HashMap<&'static Location<'static>, Arc<SiteRecord>>,
    named: HashMap<Arc<str>, NamedSites>,
    records: Vec<Arc<SiteRecord>>,
    limit: usize,
    pub(super) iteration: u64,
    /// Buffers whose site there was no room for.
    pub(super) untracked: u64,
}

/// The allocations under one name: a site for each, in the order in which an iteration makes them.
#[derive(Debug, Default)]
struct NamedSites {
    next: usize,
    records: Vec<Arc<SiteRecord>>,
}

impl SiteTable {
    /// In the first iteration, with room for `limit` sites.
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

    /// The site at a place of the source; `None` if there is no room for another.
    pub(super) fn at(&mut self, location: &'static Location<'static>) -> Option<Arc<SiteRecord>> {
        if let Some(record) = self.located.get(location) {
            return Some(Arc::clone(record));
        }
        let record = self.add(|| Site::Location(location))?;
        self.located.insert(location, Arc::clone(&record));
        Some(record)
    }

    /// The site of the next allocation under `name` in this iteration; `None` if there is no room for another.
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

    pub(super) fn records(&self) -> &[Arc<SiteRecord>] {
        &self.records
    }

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
