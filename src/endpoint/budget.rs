//! The limit on registered memory that all connections of this process share.

use std::sync::{Arc, LazyLock, Mutex};

use super::config::Config;
use tonic_rdma_verbs::internal::lock;
use tonic_rdma_verbs::memory::Budget;

/// The budget, once the first connection has set its limit.
static BUDGET: LazyLock<Mutex<Option<Arc<Budget>>>> = LazyLock::new(Mutex::default);

/// Returns the budget of this process. The first call creates it with the limit of `config`.
pub(crate) fn budget(locks_memory: bool, config: &Config) -> Arc<Budget> {
    let mut budget = lock(&BUDGET);
    Arc::clone(budget.get_or_insert_with(|| Budget::for_process(locks_memory, config.pinned_limit)))
}
