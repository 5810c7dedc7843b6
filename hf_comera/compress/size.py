"""Parameters and bytes of a model, and of the dense model that it stands for."""

from dataclasses import dataclass

from torch import nn

from hf_comera.modules import compressed_layers

__all__ = ["SizeReport", "print_trainable_parameters", "size_report"]


@dataclass(frozen=True, kw_only=True)
class SizeReport:
    """Sizes of a whole model and of its compressed layers; tied weights count once."""

    dense_parameters: int
    parameters: int
    trainable_parameters: int
    dense_bytes: int
    bytes: int
    compressed_dense_parameters: int
    """Entries of the dense weights that the compressed layers stand for."""
    compressed_parameters: int
    """Entries of all cores, and of the tables and projections of factorized embeddings."""
    gate_parameters: int = 0
    """Entries of all rank gates, which are gone when training ends; the dense model has none."""

    @property
    def ratio(self) -> float:
        """Dense over compressed parameters of the whole model."""
        return self.dense_parameters / max(self.parameters, 1)

    @property
    def compressed_ratio(self) -> float:
        """Dense over compressed parameters of the compressed layers alone; 1 if there are none."""
        return self.compressed_dense_parameters / self.compressed_parameters if self.compressed_parameters else 1.0

    def __str__(self) -> str:
        """One line for logs."""
        return (
            f"parameters: {self.parameters:,} ({_megabytes(self.bytes)}), dense: {self.dense_parameters:,} "
            f"({_megabytes(self.dense_bytes)}), ratio {self.ratio:.1f}x; compressed layers: "
            f"{self.compressed_parameters:,} for {self.compressed_dense_parameters:,}, {self.compressed_ratio:.1f}x; "
            f"trainable: {self.trainable_parameters:,} ({self.trainable_parameters / max(self.parameters, 1):.1%})"
        )


def size_report(model: nn.Module) -> SizeReport:
    """Count the parameters and bytes of ``model`` (any model; only compressed layers differ from dense)."""
    trains = compressed_layers(model).values()
    compressed = sum(module.num_core_parameters for module in trains)
    dense = sum(module.num_dense_parameters for module in trains)
    parameters = list(model.parameters())
    gates = sum(gate.numel() for module in trains for gate in module.rank_gates())
    own_bytes = sum(p.numel() * p.element_size() for module in trains for p in module.train_parameters())
    dense_bytes = sum(module.num_dense_parameters * module.cores()[0].element_size() for module in trains)
    total, total_bytes = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
    return SizeReport(
        dense_parameters=total - compressed - gates + dense,
        parameters=total,
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        dense_bytes=total_bytes - own_bytes + dense_bytes,
        bytes=total_bytes,
        compressed_dense_parameters=dense,
        compressed_parameters=compressed,
        gate_parameters=gates,
    )


def print_trainable_parameters(model: nn.Module) -> None:
    """Print parameters and bytes, dense and compressed, and the ratios."""
    print(size_report(model))


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
