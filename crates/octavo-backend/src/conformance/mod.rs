//! What every backend must agree on with [`Reference`](crate::Reference), over odd sizes.
//!
//! [`run_all`] builds small random decoders, poisons the whole KV pool with NaN (by computing a token whose embedding is
//! NaN in every slot), and compares log-probabilities: by `==` where [`crate::numerics`] defines the bits, otherwise
//! within a tolerance, and by `==` between two ways of computing the same row with the same backend. A backend whose sums
//! have no fixed order ([`crate::Sums::Free`]) is held to tolerances everywhere.

mod agreement;
mod attention;
mod driver;
mod head;
mod matmul;
mod model;
mod sharing;
mod whole;

use crate::Backend;
pub use driver::{Driver, Feed};
pub use model::{TinyModel, TinyShape};

/// Runs every case; `make` builds the backend anew for each model.
///
/// # Panics
/// At the first disagreement, naming the case, the row and the token.
pub fn run_all<B: Backend>(make: impl Fn() -> B) {
    matmul::bits_equal_the_mirrored_reference(&make);
    matmul::tied_head_reads_the_embedding(&make);
    attention::agrees_over_shapes_and_part_filled_blocks(&make);
    attention::windows_hide_what_lies_before_them(&make);
    whole::agrees_in_every_format(&make);
    whole::bits_do_not_depend_on_chunks_neighbours_or_place(&make);
    whole::a_row_that_is_not_finite_fails_alone(&make);
    whole::draws_equal_the_reference(&make);
    whole::inputs_out_of_bounds_are_refused(&make);
    sharing::sequences_that_share_blocks_equal_unshared_runs(&make);
    sharing::forks_and_the_owner_of_the_copied_block_go_their_own_ways(&make);
    sharing::each_group_copies_its_own_blocks(&make);
    sharing::a_table_may_begin_with_vacant_entries_before_its_window(&make);
    sharing::draws_of_one_row_equal_those_of_separate_requests(&make);
    head::rules_scores_and_hidden_states_equal_the_reference(&make);
    head::padding_is_never_drawn_nor_weighed(&make);
    head::scores_and_hidden_states_do_not_depend_on_chunks(&make);
}

#[cfg(test)]
mod tests {
    use crate::Reference;

    #[test]
    fn the_reference_conforms_to_itself() {
        super::run_all(Reference::exact);
    }
}
